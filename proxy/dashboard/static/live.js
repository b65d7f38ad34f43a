// Keeps the parts of a page marked data-live up to date, while somebody looks; says in words what has changed.
(function () {
  "use strict";
  const EVERY_MS = 2000;
  const announce = document.querySelector("[data-announce]");
  function facts() {
    const facts = {};
    for (const one of document.querySelectorAll("[data-fact]")) facts[one.dataset.fact] = one.textContent.trim();
    return facts;
  }
  let known = facts();
  // A part stays as it is while somebody is writing in it or has written something, or chooses text.
  function isBusy(part) {
    const at = document.activeElement;
    const texts = [...part.querySelectorAll("[data-rating] textarea")];
    if (texts.some((one) => one.value !== one.defaultValue)) return true;
    if (part.contains(at) && at.matches("input, textarea, select")) return true;
    const chosen = document.getSelection();
    return Boolean(chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode));
  }
  let looks = 0;
  setInterval(function () {
    if (document.visibilityState !== "visible") return;
    looks += 1;
    for (const part of document.querySelectorAll("[data-live]")) {
      const isDue = looks % Number(part.dataset.live || 1) === 0;
      if (isDue && !isBusy(part)) part.dispatchEvent(new Event("refresh"));
    }
  }, EVERY_MS);
  document.addEventListener("htmx:after:swap", function () {
    const present = facts();
    const changed = Object.keys(present).filter((name) => name in known && known[name] !== present[name]);
    if (changed.length) announce.textContent = changed.map((name) => name + ": " + present[name]).join("; ");
    known = present;
    document.dispatchEvent(new Event("whetstone:fresh"));
  });
  // Forms that ask before they are sent.
  document.addEventListener("submit", function (event) {
    const words = event.target.dataset && event.target.dataset.confirm;
    if (words && !window.confirm(words)) event.preventDefault();
  });
})();
