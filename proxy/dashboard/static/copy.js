// Copies the text of a button with data-copy, or of the element that data-copy-of names. The buttons show only where
// this script runs.
(function () {
  "use strict";
  document.documentElement.dataset.canCopy = "yes";
  const announce = document.querySelector("[data-announce]");
  // Without TLS browsers have no clipboard, except on this machine.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    if (!isDone) throw new Error("no clipboard");
  }
  document.addEventListener("click", async function (event) {
    const button = event.target.closest("[data-copy], [data-copy-of]");
    if (!button) return;
    const of = button.dataset.copyOf;
    const text = of ? document.getElementById(of).textContent : button.dataset.copy;
    let word = "Copied";
    try { await copy(text); } catch { word = "Not copied"; }
    button.focus();
    button.textContent = word;
    announce.textContent = of ? word : word + ": " + text;
    setTimeout(function () { button.textContent = "Copy"; }, 1500);
  });
})();
