// Asks for one address, by `fetch` or by `get` of node's own modules, and prints what came.
const [how, url] = process.argv.slice(2);
const told = (status, again, body) => {
  console.log(status, again ?? "");
  process.stdout.write(body);
  process.exitCode = status === 200 ? 0 : 1;
};
const failed = (error) => {
  console.log(error.message, error.cause?.message ?? "", error.cause?.code ?? error.code ?? "");
  process.exitCode = 1;
};
if (how === "fetch") {
  fetch(url).then(async (response) => told(response.status, response.headers.get("retry-after"), await response.text()))
    .catch(failed);
} else {
  require(new URL(url).protocol.slice(0, -1)).get(url, (response) => {
    let body = "";
    response.on("data", (piece) => { body += piece; });
    response.on("end", () => told(response.statusCode, response.headers["retry-after"], body));
    response.on("error", failed);
  }).on("error", failed);
}
