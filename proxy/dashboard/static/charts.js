// Draws what the elements with data-chart say (proxy/dashboard/views/chart_data.py), and again when that changes, in place.
(function () {
  "use strict";
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000, 1000000];
  const MOST_DOTS = 120;
  const drawn = new Map();

  // Colours as the page has them now: light-dark() is only resolved on an element.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  function colour(name, alpha) {
    probe.style.color = "var(--" + name + ")";
    const resolved = getComputedStyle(probe).color;
    if (alpha === undefined) return resolved;
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = resolved;
    canvas.globalAlpha = alpha;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    return "rgba(" + [r, g, b, alpha].join(",") + ")";
  }

  function format(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return String(Number(value.toPrecision(3)).toExponential()).replace(/-/g, "−");
    return String(Number(value.toPrecision(4))).replace("-", "−");
  }

  // One mark at each version: its shape shows its state, its colour shows it again. Hollow: too few rewards.
  function mark(u, chart, i, colours) {
    const ctx = u.ctx, ratio = devicePixelRatio || 1;
    const state = chart.state[i], y = chart.y[i];
    const isRejected = state === "rejected";
    if (y === null && !isRejected) return;
    const cx = u.valToPos(chart.x[i], "x", true);
    const cy = y === null ? u.bbox.top + u.bbox.height - 6 * ratio : u.valToPos(y, "y", true);
    const r = 4 * ratio;
    ctx.lineWidth = 2 * ratio;
    if (chart.x.length === 1 && chart.low[i] !== null) {
      // No curve yet whose band would show it.
      ctx.strokeStyle = colours.accent;
      ctx.beginPath();
      for (const end of [chart.low[i], chart.high[i]]) {
        const at = u.valToPos(end, "y", true);
        ctx.moveTo(cx, cy); ctx.lineTo(cx, at);
        ctx.moveTo(cx - 2 * r, at); ctx.lineTo(cx + 2 * r, at);
      }
      ctx.stroke();
    }
    ctx.beginPath();
    if (isRejected) {
      ctx.strokeStyle = colours.bad;
      ctx.moveTo(cx - r, cy - r); ctx.lineTo(cx + r, cy + r);
      ctx.moveTo(cx + r, cy - r); ctx.lineTo(cx - r, cy + r);
      ctx.stroke();
    } else if (chart.x[i] === chart.live) {
      ctx.fillStyle = chart.few[i] ? colours.surface : colours.good;
      ctx.strokeStyle = chart.few[i] ? colours.good : colours.surface;
      const d = 1.7 * r;
      ctx.moveTo(cx, cy - d); ctx.lineTo(cx + d, cy); ctx.lineTo(cx, cy + d); ctx.lineTo(cx - d, cy);
      ctx.closePath(); ctx.fill(); ctx.stroke();
    } else if (state === "candidate" || state === "building") {
      ctx.fillStyle = chart.few[i] ? colours.surface : colours.info;
      ctx.strokeStyle = colours.info;
      ctx.moveTo(cx, cy - r); ctx.lineTo(cx + r, cy + r); ctx.lineTo(cx - r, cy + r);
      ctx.closePath(); ctx.fill(); ctx.stroke();
    } else if (chart.x.length <= MOST_DOTS) {
      ctx.fillStyle = chart.few[i] ? colours.surface : colours.accent;
      ctx.strokeStyle = colours.accent;
      ctx.lineWidth = 1.5 * ratio;
      ctx.arc(cx, cy, 0.6 * r, 0, 2 * Math.PI); ctx.fill(); ctx.stroke();
    }
  }

  // A version's held-out mean: a square on its 95 % interval.
  function heldOut(u, held, i, cx, colours) {
    if (held.y[i] === null) return;
    const ctx = u.ctx, ratio = devicePixelRatio || 1, cy = u.valToPos(held.y[i], "y", true);
    ctx.strokeStyle = colours["held-out"];
    ctx.fillStyle = held.few[i] ? colours.surface : colours["held-out"];
    ctx.lineWidth = 1.5 * ratio;
    ctx.beginPath();
    if (held.low[i] !== null) {
      ctx.moveTo(cx, u.valToPos(held.low[i], "y", true)); ctx.lineTo(cx, u.valToPos(held.high[i], "y", true));
    }
    ctx.stroke();
    if (held.y.length > MOST_DOTS) return;
    const r = 3 * ratio;
    ctx.beginPath();
    ctx.rect(cx - r, cy - r, 2 * r, 2 * r); ctx.fill(); ctx.stroke();
  }

  function marks(chart) {
    return function (u) {
      const now = u.whetstone || chart;
      const ctx = u.ctx, ratio = devicePixelRatio || 1;
      ctx.save();
      if (now.kind === "rewards") {
        const colours = {};
        for (const name of ["good", "bad", "info", "accent", "surface", "held-out"]) colours[name] = colour(name);
        for (let i = 0; i < now.x.length; i++) heldOut(u, now.held_out, i, u.valToPos(now.x[i], "x", true), colours);
        for (let i = 0; i < now.x.length; i++) if (now.x[i] !== now.live) mark(u, now, i, colours);
        const at = now.x.indexOf(now.live);
        if (at >= 0) mark(u, now, at, colours);
      } else if (now.kind === "figure") {
        const at = now.marked === null ? now.x.length - 1 : now.x.indexOf(now.marked);
        if (at >= 0 && now.y[at] !== null) {
          ctx.fillStyle = colour("accent");
          ctx.strokeStyle = colour("surface");
          ctx.lineWidth = 2 * ratio;
          ctx.beginPath();
          ctx.arc(u.valToPos(now.x[at], "x", true), u.valToPos(now.y[at], "y", true), 4.5 * ratio, 0, 2 * Math.PI);
          ctx.fill(); ctx.stroke();
        }
      }
      ctx.restore();
    };
  }

  function mean(of, i) {
    const interval = of.low[i] === null ? "" : " (" + format(of.low[i]) + " to " + format(of.high[i]) + ")";
    return format(of.y[i]) + interval + ", n " + of.n[i];
  }

  function tip() {
    const box = document.createElement("div");
    box.className = "tip";
    box.hidden = true;
    return function (u) {
      if (!box.isConnected) u.over.append(box);
      const now = u.whetstone, i = u.cursor.idx;
      if (!now || i === null || i === undefined || u.cursor.left < 0) { box.hidden = true; return; }
      let words = now.kind === "hours"
        ? now.labels[i] + ": " + now.series.map((line) => format(line.y[i]) + " " + line.name).join(", ")
        : now.x_is + " " + now.x[i] + ": " + (now.kind === "rewards" ? mean(now, i) : format(now.y[i]));
      if (now.kind === "rewards") {
        if (now.held_out.y[i] !== null) words += "; held out " + mean(now.held_out, i);
        if (now.beside) words += "; " + now.beside.name + " " + format(now.beside.y[i]);
        words += "; " + now.state[i];
      }
      box.textContent = words;
      box.hidden = false;
      const left = u.cursor.left > u.over.clientWidth / 2 ? u.cursor.left - box.offsetWidth - 12 : u.cursor.left + 12;
      box.style.left = Math.max(0, Math.min(left, u.over.clientWidth - box.offsetWidth)) + "px";
      box.style.top = "4px";
    };
  }

  function columns(chart) {
    if (chart.kind === "hours") return [chart.x, ...chart.series.map((line) => line.y)];
    if (chart.kind === "figure") return [chart.x, chart.y];
    // What never answered everybody is marked beside the lines, at its own height: columns without a line keep it in view.
    const lived = (values) => values.map((value, i) => chart.was_live[i] ? value : null);
    const held = chart.held_out;
    const beside = chart.beside ? [chart.beside.y] : [];
    return [chart.x, lived(chart.high), lived(chart.low), lived(chart.y), chart.y, lived(held.y), held.y, held.low, held.high, ...beside];
  }

  // As wide as its longest number.
  function wide(u, ticks) {
    return ticks ? Math.max(34, 12 + 6.5 * Math.max(0, ...ticks.map((tick) => tick.length))) : 44;
  }

  // All of it; one alone stands in the middle.
  function around(u) {
    const x = u.data[0];
    if (!x.length) return [0, 1];
    return x.length === 1 ? [x[0] - 1, x[0] + 1] : [x[0], x[x.length - 1]];
  }

  function options(element, chart) {
    const isSmall = chart.kind !== "rewards", isHours = chart.kind === "hours";
    const accent = colour("accent"), muted = colour("muted"), line = colour("line");
    const font = "11px " + getComputedStyle(document.body).fontFamily;
    const axis = { stroke: muted, font: font, ticks: { stroke: line, width: 1, size: 4 }, grid: { stroke: line, width: 1 } };
    const gap = 1.6;
    const curve = { stroke: accent, width: isSmall ? gap : 2, spanGaps: true, points: { show: chart.x.length === 1 } };
    const edge = { stroke: "transparent", points: { show: false }, spanGaps: true };
    const unseen = { ...edge, spanGaps: false };
    const held = { ...edge, stroke: colour("held-out"), width: gap, dash: [4, 3] };
    const beside = chart.beside ? [{ ...edge, stroke: muted, width: gap, dash: [1, 3] }] : [];
    const lines = isHours ? chart.series.map((one, i) => ({
      ...curve, stroke: colour(one.colour), dash: i ? [4, 3] : undefined, spanGaps: false, points: { show: true, size: 4 },
    })) : [curve];
    // A small chart shows its least and its most, whatever round numbers lie between them; amounts begin with 0.
    const extent = function (u) {
      const values = u.data.slice(1).flat().filter((value) => value !== null);
      return values.length ? [...new Set([isHours ? 0 : Math.min(...values), Math.max(...values)])] : [];
    };
    return {
      width: element.clientWidth,
      height: element.clientHeight,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { y: false, points: { size: 7, fill: accent }, drag: { x: false, y: false } },
      scales: {
        x: { time: false, range: around },
        y: { range: function (u, least, most) {
          if (least === null) return [0, 1];
          if (isHours) return [0, 1.08 * most || 1];
          const room = (most - least || Math.abs(most) || 1) * 0.08;
          return [least - room, most + room];
        } },
      },
      axes: [
        { ...axis, incrs: WHOLE, size: 26, grid: { show: false }, space: 46,
          values: (u, ticks) => ticks.map((tick) => tick < 0 ? "" : isHours ? (u.whetstone || chart).labels[tick] || "" : String(tick)) },
        { ...axis, size: wide, space: isSmall ? 20 : 40, values: (u, ticks) => ticks.map(format), ...(isSmall && { splits: extent }) },
      ],
      series: isSmall ? [{}, ...lines] : [{}, edge, edge, curve, unseen, held, unseen, unseen, unseen, ...beside],
      bands: isSmall ? [] : [{ series: [1, 2], fill: colour("accent", 0.16) }],
      hooks: { draw: [marks(chart)], setCursor: [tip()] },
    };
  }

  function draw(element) {
    const text = element.dataset.chart;
    const chart = JSON.parse(text);
    const plot = new uPlot(options(element, chart), columns(chart), element);
    plot.whetstone = chart;
    const resized = new ResizeObserver(function () {
      if (element.clientWidth) plot.setSize({ width: element.clientWidth, height: element.clientHeight });
    });
    resized.observe(element);
    drawn.set(element, { plot, text, resized });
  }

  function drop(element) {
    const { plot, resized } = drawn.get(element);
    resized.disconnect();
    plot.destroy();
    drawn.delete(element);
  }

  function refresh() {
    for (const element of [...drawn.keys()]) if (!element.isConnected) drop(element);
    for (const element of document.querySelectorAll("[data-chart]")) {
      const before = drawn.get(element);
      if (!before) draw(element);
      else if (before.text !== element.dataset.chart) {
        before.text = element.dataset.chart;
        before.plot.whetstone = JSON.parse(before.text);
        before.plot.setData(columns(before.plot.whetstone));
      }
    }
  }

  function redraw() {
    for (const element of [...drawn.keys()]) drop(element);
    refresh();
  }

  refresh();
  document.addEventListener("whetstone:fresh", refresh);
  document.addEventListener("whetstone:theme", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
