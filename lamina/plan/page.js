"use strict";
// Maps: hovering, or the arrow keys, name the bytes under the pointer. Regions come from the page's JSON, sorted by place.
(function () {
  const root = document.documentElement;
  const tip = document.querySelector(".tip");
  const number = (n) => n.toLocaleString("en-US");

  function describe(map, region) {
    const [start, size, layer, memory, field, rows, stored] = region;
    const page = Math.floor(start / map.page_bytes), offset = start - page * map.page_bytes;
    const where = (map.num_pages > 1 ? "page " + page + ", " : "") + "offset " + number(offset) + ", " + number(size) + " bytes";
    if (layer === -1) return "padding: " + map.fields[field] + "\n" + where;
    const name = map.memories[memory] === map.fields[field] ? map.fields[field] : map.memories[memory] + " · " + map.fields[field];
    return (layer < 0 ? "" : "layer " + layer + " · ") + name + "\n" + where + "\n" +
      number(rows) + (rows === 1 ? " row of " : " rows of ") + map.stored[stored] + " (" + number(size / rows) + " B)";
  }

  // index of the region that holds a byte
  function find(map, byte) {
    let low = 0, high = map.regions.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (map.regions[middle][0] <= byte) low = middle; else high = middle - 1;
    }
    return low;
  }

  function boxes(map, region) {
    const found = [];
    map.lines.forEach(([first, stop, y]) => {
      const from = Math.max(first, region[0]), to = Math.min(stop, region[0] + region[1]);
      if (from < to) found.push([map.gutter + (from - first) / map.scale, y, Math.max((to - from) / map.scale, 1)]);
    });
    return found;
  }

  document.querySelectorAll("svg.map").forEach((svg) => {
    const map = JSON.parse(document.getElementById(svg.id + "-data").textContent);
    const readout = document.getElementById(svg.id + "-readout");
    let current = -1;

    function mark(index) {
      current = index;
      svg.querySelectorAll(".mark").forEach((box) => box.remove());
      for (const [x, y, width] of boxes(map, map.regions[index])) {
        const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        for (const [key, value] of Object.entries({ class: "mark", x: x, y: y, width: width, height: map.line_height }))
          box.setAttribute(key, value);
        svg.appendChild(box);
      }
      readout.textContent = describe(map, map.regions[index]).replace(/\n/g, " · ");
    }

    svg.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const line = map.lines.find(([, , y]) => at.y >= y && at.y < y + map.line_height);
      const byte = line === undefined ? -1 : line[0] + (at.x - map.gutter) * map.scale;
      if (line === undefined || byte < line[0] || byte >= line[1]) { tip.style.display = "none"; return; }
      const index = find(map, byte);
      if (index !== current) mark(index);
      // everything within half a pixel: arrays that are too thin to be hit one by one
      const low = find(map, Math.max(line[0], byte - map.scale / 2)), high = find(map, Math.min(line[1] - 1, byte + map.scale / 2));
      const lines = map.regions.slice(low, Math.min(high, low + 7) + 1).map((region) => describe(map, region));
      if (high - low > 7) lines.push("and " + (high - low - 7) + " more");
      tip.textContent = lines.join("\n");
      tip.style.display = "block";
      const box = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
      tip.style.top = (event.clientY + 18 + box.height < innerHeight ? event.clientY + 18 : event.clientY - box.height - 12) + "px";
    });
    svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const last = map.regions.length - 1;
      if (step !== undefined) mark(Math.max(0, Math.min(last, current + step)));
      else if (event.key === "Home") mark(0);
      else if (event.key === "End") mark(last);
      else return;
      event.preventDefault();
    });

    const table = document.getElementById(svg.id + "-table");
    table.addEventListener("toggle", () => {
      const body = table.querySelector("tbody");
      if (!table.open || body.childElementCount) return;
      const rows = document.createDocumentFragment();
      for (const [start, size, layer, memory, field, count, stored] of map.regions) {
        const page = Math.floor(start / map.page_bytes), padding = layer === -1;
        const row = document.createElement("tr");
        [page, number(start - page * map.page_bytes), number(size), layer < 0 ? "" : layer, padding ? "padding" : map.memories[memory],
          map.fields[field], padding ? "" : number(count) + " x " + map.stored[stored]].forEach((text, column) => {
          const cell = document.createElement("td");
          cell.textContent = text;
          if (column < 4) cell.className = "n";
          row.appendChild(cell);
        });
        rows.appendChild(row);
      }
      body.appendChild(rows);
    });
  });

  // Charts take their colours from the page, on light and on dark paper.
  function paint() {
    const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(name).trim();
    document.querySelectorAll(".plotly-graph-div").forEach((chart) => {
      const update = { "font.color": colour("--ink"), "hoverlabel.bgcolor": colour("--panel"), "hoverlabel.bordercolor": colour("--soft"),
        "hoverlabel.font.color": colour("--ink") };
      for (const axis of Object.keys(chart.layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
        update[axis + ".gridcolor"] = colour("--line");
        update[axis + ".linecolor"] = colour("--soft");
        update[axis + ".zerolinecolor"] = colour("--line");
      }
      window.Plotly.relayout(chart, update);
    });
  }
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    paint();
  });
})();
