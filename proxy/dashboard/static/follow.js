// Follows the calls of the live page: asks every two seconds for those that ended since, and puts them on top.
(function () {
  "use strict";
  const EVERY_MS = 2000;
  const MOST_ROWS = 200;
  const list = document.querySelector("[data-follow]");
  const status = document.querySelector("[data-follow-status]");
  const button = document.querySelector("[data-follow-pause]");
  if (!list) return;
  let isPaused = false, isAsking = false;

  function say(words) {
    if (status.textContent !== words) status.textContent = words;
  }
  function calls(count) {
    return count + (count === 1 ? " new call" : " new calls");
  }
  // Rows must not move away from somebody who points at one, or copies from it.
  function isInUse() {
    const chosen = document.getSelection();
    return list.matches(":hover, :focus-within") || Boolean(chosen && !chosen.isCollapsed && list.contains(chosen.anchorNode));
  }
  function add(answer) {
    const known = new Set([...list.rows].map((row) => row.dataset.call));
    const fresh = [...answer.rows].filter((row) => !known.has(row.dataset.call));
    list.prepend(...fresh);
    while (list.rows.length > MOST_ROWS) list.rows[list.rows.length - 1].remove();
    list.dataset.follow = answer.dataset.follow;
    const unlisted = Number(answer.dataset.ended) - fresh.length;
    if (unlisted > 0) say(calls(fresh.length) + "; " + unlisted + " more are not listed.");
    else if (fresh.length) say(calls(fresh.length) + ".");
    else say(list.rows.length ? "Waiting for calls." : "No call matches yet.");
  }
  async function look() {
    if (isPaused || isAsking || document.visibilityState !== "visible") return;
    if (isInUse()) { say("Holding still while you are on the list."); return; }
    isAsking = true;
    try {
      const url = new URL(location.href);
      url.searchParams.set("after", list.dataset.follow);
      const response = await fetch(url, { cache: "no-store" });
      if (response.redirected) { location.reload(); return; } // the session is over
      if (!response.ok) throw new Error(String(response.status));
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      if (!isPaused) add(page.querySelector("[data-follow]"));
    } catch {
      say("The proxy does not answer; trying again.");
    } finally {
      isAsking = false;
    }
  }
  button.hidden = false;
  button.addEventListener("click", function () {
    isPaused = !isPaused;
    button.setAttribute("aria-pressed", String(isPaused));
    button.textContent = isPaused ? "Continue" : "Pause";
    say(isPaused ? "Paused." : "Waiting for calls.");
    look();
  });
  setInterval(look, EVERY_MS);
})();
