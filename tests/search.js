// Answers queries with the built site's own search: node search.js SITE QUERY... prints the pages of each answer, best first.
const fs = require("fs");
const [site, ...queries] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers`;
const { config, docs } = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`));

// What the worker expects of a browser.
let ask, answered;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { ask = listener; };
globalThis.postMessage = message => answered(message.data);
const answer = (type, data) => new Promise(resolve => { answered = resolve; ask({ data: { type, data } }); });
const [SETUP, QUERY] = [0, 2];

(async () => {
  const script = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name));
  (0, eval)(fs.readFileSync(`${workers}/${script}`, "utf8"));
  await answer(SETUP, { config, docs, options: { suggest: false } });
  const found = {};
  for (const query of queries) {
    const { items } = await answer(QUERY, query);
    found[query] = items.map(sections => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
