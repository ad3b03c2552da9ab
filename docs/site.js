// Code in text breaks at its spaces alone, never inside an option; a name of over 30 characters, after a sign.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (code.children.length) continue;
  code.innerHTML = code.innerHTML
    .split(" ")
    .map((word) =>
      word.length > 30 ? word.replace(/[_:.(=/]|[a-z](?=[A-Z])/g, "$&<wbr>") : `<span class="whole">${word}</span>`,
    )
    .join(" ");
}
// A table that is wider than its page becomes cards, a row each (docs/site.css).
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const names = [...table.querySelectorAll("thead th")].map((th) => th.innerText.trim());
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, i) => names[i] && (cell.dataset.label = names[i]));
    for (const cell of row.cells) {
      if (!cell.children.length) cell.innerHTML = cell.innerHTML.replace(/\([^\s()]+–[^\s()]+\)/, '<span class="interval">$&</span>');
    }
  }
}
// Intervals are whole where there is room. What still scrolls can be scrolled by keyboard.
function fitTables() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const inner = table.querySelector("table");
    const tooWide = () => table.scrollWidth > table.clientWidth;
    delete inner.dataset.cards;
    inner.dataset.whole = "";
    if (tooWide()) delete inner.dataset.whole;
    if (tooWide()) {
      inner.dataset.cards = inner.dataset.whole = "";
      table.tabIndex = 0;
      table.setAttribute("role", "region");
      table.setAttribute("aria-label", "Table that scrolls");
    }
  }
}
window.addEventListener("load", fitTables);
window.addEventListener("resize", fitTables);

// A list of versions beside the name, as Material for MkDocs draws it. `versions.js` calls this; it
// lies above the folder of this version, so that an older version shows those that came later.
const root = new URL("../", document.currentScript.src); // of docs/versions.py
const current = decodeURIComponent(
  new URL(".", document.currentScript.src).pathname.split("/").at(-2),
);
function showVersions(versions) {
  const link = (name) =>
    `<li class="md-version__item"><a class="md-version__link" href="${new URL(`${name}/index.html`, root)}">${name}</a></li>`;
  document.querySelector(".md-header__topic").insertAdjacentHTML(
    "beforeend",
    `<div class="md-version"><button class="md-version__current" aria-label="Version ${current}">${current}</button>` +
      `<ul class="md-version__list">${versions.map(link).join("")}</ul></div>`,
  );
}
document.head.append(
  Object.assign(document.createElement("script"), { src: new URL("versions.js", root) }),
);
