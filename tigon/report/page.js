"use strict";
// Values under the pointer. All text goes in as textContent.
const tip = document.getElementById("tip");

for (const plot of document.querySelectorAll("svg.plot")) {
  const [low, high, left, right] = ["low", "high", "left", "right"].map((k) => Number(plot.dataset[k]));
  const width = plot.viewBox.baseVal.width;
  const cursor = plot.querySelector(".cursor");
  const lines = [...plot.querySelectorAll(".series")].map((group) => {
    const list = (name) => (group.dataset[name] || "").split(" ");
    const x = list("x").map(Number);
    return {
      name: group.dataset.name, unit: group.dataset.unit, x, y: list("y"),
      first: group.dataset.first ? list("first").map(Number) : x, min: list("min"), max: list("max"),
    };
  });
  const steps = [...new Set(lines.flatMap((line) => line.x.map((x, i) => (x + line.first[i]) / 2)))];
  steps.sort((a, b) => a - b);
  let at = -1;

  const place = (step) => left + ((step - low) / (high - low)) * (width - left - right);

  function nearest(line, step) {
    let best = 0;
    for (let i = 1; i < line.x.length; i++) {
      const middle = (line.x[i] + line.first[i]) / 2, before = (line.x[best] + line.first[best]) / 2;
      if (Math.abs(middle - step) < Math.abs(before - step)) best = i;
    }
    return best;
  }

  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], rows = [];
    for (const line of lines) {
      const i = nearest(line, step);
      const span = line.first[i] === line.x[i] ? `step ${line.x[i]}` : `steps ${line.first[i]}–${line.x[i]}`;
      const value = line.y[i] === "-" ? "not finite" : line.y[i] + line.unit;
      const range = line.first[i] === line.x[i] || line.y[i] === "-" ? "" : ` (${line.min[i]} … ${line.max[i]})`;
      rows.push(`${line.name}: ${value}${range}, ${span}`);
    }
    tip.textContent = rows.join("\n");
    tip.hidden = false;
    const box = plot.getBoundingClientRect(), x = box.left + (place(step) / width) * box.width;
    const gap = 14, wide = document.documentElement.clientWidth;
    const over = x + gap + tip.offsetWidth > wide - 8;
    tip.style.left = `${Math.max(8, over ? x - gap - tip.offsetWidth : x + gap) + window.scrollX}px`;
    tip.style.top = `${box.top + 8 + window.scrollY}px`;
    cursor.setAttribute("transform", `translate(${place(step)})`);
    cursor.style.visibility = "visible";
  }

  function hide() {
    tip.hidden = true;
    cursor.style.visibility = "hidden";
  }

  function point(event) {
    const box = plot.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * width;
    const step = low + ((inside - left) / (width - left - right)) * (high - low);
    let best = 0;
    steps.forEach((value, i) => { if (Math.abs(value - step) < Math.abs(steps[best] - step)) best = i; });
    show(best);
  }

  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    show(at + move);
  });
}

// Paper has nothing to click on
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("article details")) details.open = true;
});
