/* <whetstone-thumbs token="wft_…"> puts two thumbs and a comment under an answer.
 * The token permits feedback on that one answer, until it expires. An API key must never be in a page.
 * Texts are attributes: up, down, comment, send, sent, failed. `url` is the proxy's address, if this script is not from
 * there. After each post comes the event "whetstone-feedback". */
(() => {
  "use strict";
  const script = document.currentScript;
  const TEXTS = {
    up: "Good answer", down: "Bad answer", comment: "What was good or bad about it?", send: "Send",
    sent: "Thank you.", failed: "This could not be sent.",
  };
  const make = (name, text, attributes) => {
    const made = document.createElement(name);
    made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  class Thumbs extends HTMLElement {
    static observedAttributes = ["token"];

    connectedCallback() {
      if (!this.buttons) this.render();
    }

    attributeChangedCallback() {
      if (this.buttons) this.render(); // another answer's token: nothing is rated yet
    }

    render() {
      const text = (name) => this.getAttribute(name) ?? TEXTS[name];
      this.setAttribute("role", "group");
      this.status = make("span", "", { role: "status" });
      this.buttons = [["up", "👍"], ["down", "👎"]].map(([thumbs, sign]) => {
        const button = make("button", sign, { type: "button", "aria-label": text(thumbs), "aria-pressed": "false" });
        button.addEventListener("click", () => this.post({ thumbs }));
        return button;
      });
      this.form = make("form", "", { hidden: "" });
      const hint = text("comment");
      const comment = make("input", "", { maxlength: "2000", "aria-label": hint, placeholder: hint });
      this.form.append(comment, make("button", text("send"), {}));
      this.form.addEventListener("submit", (event) => {
        event.preventDefault();
        if (comment.value.trim()) this.post({ thumbs: this.thumbs, comment: comment.value });
      });
      this.text = text;
      this.thumbs = null;
      this.replaceChildren(...this.buttons, this.form, this.status);
    }

    async post(body) {
      const token = this.getAttribute("token");
      if (this.busy) return;
      this.busy = true;
      this.status.textContent = "";
      let error = null;
      try {
        if (!/^wft_[\w-]+$/.test(token)) throw new Error("token must be a feedback token, wft_…; keys are not sent");
        const answer = await fetch(new URL("v1/feedback", this.getAttribute("url") || script?.src), {
          method: "POST",
          credentials: "omit",
          headers: { "Content-Type": "application/json", "X-Feedback-Token": token },
          body: JSON.stringify(body),
        });
        if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? answer.status);
      } catch (caught) {
        error = caught.message;
        console.warn(`whetstone: ${error}`);
      }
      this.busy = false;
      if (token !== this.getAttribute("token")) return;
      if (!error) {
        this.thumbs = body.thumbs;
        const signs = ["up", "down"];
        this.buttons.forEach((button, place) => button.setAttribute("aria-pressed", signs[place] === body.thumbs));
        this.form.hidden = "comment" in body;
      }
      this.status.textContent = this.text(error ? "failed" : "sent");
      this.dispatchEvent(new CustomEvent("whetstone-feedback", { bubbles: true, detail: { ...body, error } }));
    }
  }

  customElements.define("whetstone-thumbs", Thumbs);
})();
