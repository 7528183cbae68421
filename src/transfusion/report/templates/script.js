"use strict";
(() => {
  const root = document.documentElement;
  const all = (what, inside = document) => [...inside.querySelectorAll(what)];

  // ── the theme ──
  const wish = matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.querySelector("[data-theme-toggle]");
  const now = () => root.dataset.theme || (wish.matches ? "dark" : "light");
  const name = () => toggle.setAttribute("aria-label", `Switch to the ${now() === "dark" ? "light" : "dark"} theme`);
  toggle.addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    try { localStorage.setItem("transfusion-theme", root.dataset.theme); } catch (error) { /* not remembered */ }
    name();
  });
  wish.addEventListener("change", name);
  name();

  // ── tabs ──
  for (const group of all("[data-tabs]")) {
    const tabs = all("[role=tab]", group);
    const choose = (chosen, focus) => {
      for (const tab of tabs) {
        const on = tab === chosen;
        const panel = document.getElementById(tab.getAttribute("aria-controls"));
        tab.setAttribute("aria-selected", String(on));
        tab.tabIndex = on ? 0 : -1;
        panel.toggleAttribute("data-shown", on);
        panel.toggleAttribute("data-hidden", !on);
      }
      if (focus) chosen.focus();
    };
    tabs.forEach((tab, place) => {
      tab.addEventListener("click", () => choose(tab));
      tab.addEventListener("keydown", (event) => {
        const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        choose(tabs[(to + tabs.length) % tabs.length], true);
      });
    });
  }

  // ── values, by pointing or by arrow keys ──
  const tip = document.getElementById("tip");
  let lit = null;
  const hide = () => { tip.hidden = true; if (lit) lit.classList.remove("on"); lit = null; };
  const tell = (mark, keep) => {
    hide();
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    if (keep) { lit = mark; mark.classList.add("on"); }
    const box = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const x = Math.min(Math.max(4, box.left + box.width / 2 - own.width / 2), root.clientWidth - own.width - 4);
    const above = box.top - own.height - 8;
    tip.style.transform = `translate(${x}px, ${above < 4 ? box.bottom + 8 : above}px)`;
  };
  for (const svg of all(".drawing svg")) {
    const marks = all("[data-tip]", svg);
    let place = -1;
    svg.addEventListener("pointerover", (event) => {
      const mark = event.target.closest("[data-tip]");
      if (mark) tell(mark, false);
    });
    svg.addEventListener("pointerout", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !marks.length) return;
      event.preventDefault();
      place = (place + step + marks.length) % marks.length;
      tell(marks[place], true);
    });
  }
  addEventListener("scroll", hide, { passive: true });

  // ── export ──
  const kept = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
    "opacity", "font-family", "font-size", "font-style", "font-weight", "text-anchor"];
  const standalone = (svg) => {
    const copy = svg.cloneNode(true);
    const ours = [svg, ...all("*", svg)], theirs = [copy, ...all("*", copy)];
    ours.forEach((one, place) => {
      const style = getComputedStyle(one);
      theirs[place].setAttribute("style", kept.map((key) => `${key}:${style.getPropertyValue(key)}`).join(";"));
      for (const name of ["class", "data-tip", "tabindex"]) theirs[place].removeAttribute(name);
    });
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const edge = 16;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("viewBox", `${-edge} ${-edge} ${width + 2 * edge} ${height + 2 * edge}`);
    copy.setAttribute("width", width + 2 * edge);
    copy.setAttribute("height", height + 2 * edge);
    const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ x: -edge, y: -edge, width: width + 2 * edge, height: height + 2 * edge })) ground.setAttribute(key, value);
    ground.setAttribute("style", `fill:${getComputedStyle(root).getPropertyValue("--card")}`);
    copy.prepend(ground);
    return { text: new XMLSerializer().serializeToString(copy), width: width + 2 * edge, height: height + 2 * edge };
  };
  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  for (const button of all("[data-export]")) {
    button.addEventListener("click", () => {
      const figure = button.closest("figure");
      const drawings = all(".drawing", figure);
      const seen = drawings.find((one) => one.getClientRects().length) || drawings[0];
      const { text, width, height } = standalone(seen.querySelector("svg"));
      const file = `${figure.dataset.figure}.${button.dataset.export}`;
      if (button.dataset.export === "svg") return save(new Blob([text], { type: "image/svg+xml" }), file);
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement("canvas");
        canvas.width = 2 * width;
        canvas.height = 2 * height;
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob((blob) => save(blob, file), "image/png");
      };
      image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    });
  }

  // ── copy ──
  const copied = async (text) => {
    try { await navigator.clipboard.writeText(text); return true; } catch (error) { /* the old way */ }
    const field = document.createElement("textarea");
    field.value = text;
    field.style.position = "fixed";
    field.style.opacity = "0";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  };
  for (const button of all("[data-copy]")) {
    button.addEventListener("click", async () => {
      const done = await copied(button.parentElement.querySelector("code").textContent);
      button.textContent = done ? "Copied" : "Select it";
      button.focus();
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }

  // ── where the reader is ──
  const links = new Map(all(".contents a").map((link) => [link.getAttribute("href").slice(1), link]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const [id, link] of links) {
        link.classList.toggle("here", id === entry.target.id);
        if (id === entry.target.id) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
      }
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const id of links.keys()) watch.observe(document.getElementById(id));
})();
