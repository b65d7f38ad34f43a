// Rates without leaving the page, and by keyboard: j and k move between attempts; the keys of a form are in aria-keyshortcuts.
(function () {
  "use strict";
  const ATTEMPT = "[data-attempt]";
  let chosen = null;
  document.documentElement.dataset.keys = "";  // shows what the keys are

  // All attempts of the page; the main one first, wherever it stands.
  function attempts() {
    const all = [...document.querySelectorAll(ATTEMPT)];
    return all.sort((one, other) => (other.dataset.attempt === "main") - (one.dataset.attempt === "main"));
  }
  // The attempt that was focused last, else the main one of the page.
  function focused() {
    return chosen && chosen.isConnected ? chosen : document.querySelector('[data-attempt="main"]');
  }
  // The attempt that keys act on.
  function current() {
    return focused() || document.querySelector(ATTEMPT);
  }
  function move(by) {
    const all = attempts();
    const next = all[all.indexOf(focused()) + by];
    const more = by > 0 && document.querySelector("[data-next-attempts]");
    if (next) {
      next.focus({ preventScroll: true });
      next.scrollIntoView({ block: "start", inline: "nearest" });
    } else if (more) more.click();
  }
  function press(target) {
    const fold = target.closest("details");
    if (fold) fold.open = true;
    if (target.matches("button")) target.click();
    else target.focus();
  }
  document.addEventListener("focusin", function (event) {
    chosen = event.target.closest(ATTEMPT) || chosen;
  });
  document.addEventListener("keydown", function (event) {
    const at = event.target;
    if (at.matches("input, textarea, select")) {
      const home = at.closest(ATTEMPT);
      if (event.key === "Escape" && home) home.focus({ preventScroll: true });
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = /^[a-z1-5]$/.test(event.key) && current() && current().querySelector(`[aria-keyshortcuts="${event.key}"]`);
    if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
    else if (target) press(target);
    else return;
    event.preventDefault();
  });

  function show(form, text, isWrong) {
    const words = document.createElement("span");
    words.textContent = text;
    if (isWrong) words.className = "is-wrong";
    form.querySelector("[data-status]").replaceChildren(words);
  }
  // The reward on the attempt's card; the judging worker applies it within seconds.
  function showReward(form, reward) {
    const home = form.closest(ATTEMPT), tile = home && home.querySelector("[data-reward]");
    if (!tile) return;
    const figure = tile.querySelector(".figure");
    figure.textContent = String(reward);
    figure.classList.remove("none");
    tile.querySelector(".hint").textContent = "from your rating";
  }
  async function send(form, fields) {
    const options = { method: "POST", body: fields, headers: { accept: "application/json" }, redirect: "manual" };
    let answer, body;
    try {
      answer = await fetch(form.action, options);
      if (answer.type === "opaqueredirect") return ["Not saved: you are signed out. Reload the page.", true];
      body = (answer.headers.get("content-type") || "").startsWith("application/json") ? await answer.json() : {};
    } catch {
      return ["Not saved: the proxy does not answer. Try again.", true];
    }
    return [body.message || `Not saved: status ${answer.status}. Reload the page.`, !answer.ok, body.reward];
  }
  async function rate(form, fields, button) {
    const [text, isWrong, reward] = await send(form, fields);
    show(form, text, isWrong);
    if (isWrong) return;
    const { comment, demonstration } = form.elements;
    if (reward !== undefined) showReward(form, reward);
    if (comment) comment.defaultValue = comment.value;  // a comment goes with the next rating too
    if (demonstration && demonstration.value === fields.get("demonstration")) demonstration.value = "";
    if (!button || !button.name) return;
    for (const one of form.querySelectorAll("[aria-pressed]")) one.setAttribute("aria-pressed", String(one === button));
  }
  const last = new WeakMap();
  document.addEventListener("submit", function (event) {
    const form = event.target, button = event.submitter;
    if (!form.matches("[data-rating]")) return;
    event.preventDefault();
    show(form, "Saving…", false);
    const fields = new URLSearchParams(new FormData(form, button));
    // One after the other: of two ratings of an attempt the later one counts.
    last.set(form, Promise.resolve(last.get(form)).then(() => rate(form, fields, button)));
  });
})();
