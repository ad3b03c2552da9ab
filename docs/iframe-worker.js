// Browsers allow no web worker on a page that is opened from disk. The search runs in one: there, an
// invisible frame takes its place. What it searches has megabytes: it is loaded with the first use.
if (location.protocol === "file:") {
  const used = new Promise((resolve) => {
    document.addEventListener("focusin", ({ target }) => target.matches(".md-search__input") && resolve());
  });
  const append = document.head.appendChild.bind(document.head);
  document.head.appendChild = (node) => {
    if (node.src?.endsWith("/search_index.js")) used.then(() => append(node));
    else append(node);
    return node;
  };
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "Search";
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      used.then(() => this.inside.document.body.append(script));
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
