// Light, dark, or as the system has it: before anything is painted, so that nothing flashes.
(function () {
  "use strict";
  const order = ["auto", "light", "dark"];
  const root = document.documentElement;
  function stored() {
    try { return localStorage.getItem("whetstone-theme"); } catch { return null; }
  }
  function apply(name) {
    if (name === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", name);
  }
  let now = order.includes(stored()) ? stored() : "auto";
  apply(now);
  document.addEventListener("DOMContentLoaded", function () {
    const button = document.querySelector("[data-theme-toggle]");
    const name = document.querySelector("[data-theme-name]");
    button.hidden = false;
    name.textContent = now;
    button.addEventListener("click", function () {
      now = order[(order.indexOf(now) + 1) % order.length];
      try { localStorage.setItem("whetstone-theme", now); } catch { /* then it lasts as long as the page */ }
      apply(now);
      name.textContent = now;
      document.dispatchEvent(new Event("whetstone:theme"));
    });
  });
})();
