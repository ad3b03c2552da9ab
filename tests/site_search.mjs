// Answer queries as the site does, by its own worker on its own index: a line of addresses for each.
import { readFileSync, readdirSync } from "node:fs";
import vm from "node:vm";
const [site, ...queries] = process.argv.slice(2);
const folder = `${site}/assets/javascripts/workers`;
const worker = readdirSync(folder).find((name) => /^search.*\.js$/.test(name));
let receive, answer;
const scope = { postMessage: (said) => answer(said), addEventListener: (_, f) => (receive = f), console };
scope.self = vm.createContext(scope);
vm.runInContext(readFileSync(`${folder}/${worker}`, "utf8"), scope);
const ask = (data) => new Promise((resolve) => { answer = resolve; receive({ data }); });
const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
await ask({ type: 0, data: { ...index, options: { suggest: true } } });
for (const query of queries) {
  const { data } = await ask({ type: 2, data: query });
  console.log(JSON.stringify(data.items.slice(0, 5).map((pages) => pages[0].location)));
}
