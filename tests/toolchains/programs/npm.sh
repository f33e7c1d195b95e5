# npm: a package out of the tarball $1, without a network; node with workers, children and sockets. Ends with "npm ok".
set -eu
mkdir desk && cd desk
echo '{"name": "job", "version": "1.0.0", "private": true}' >package.json
npm install --offline --no-audit --no-fund --loglevel=error "$1" >/dev/null
cat >main.mjs <<'JS'
import assert from "node:assert"; import fs from "node:fs"; import net from "node:net"; import zlib from "node:zlib";
import { execFileSync, spawn } from "node:child_process"; import { randomBytes, scryptSync } from "node:crypto";
import { createRequire } from "node:module"; import { once } from "node:events"; import { Worker } from "node:worker_threads";
assert.equal(createRequire(import.meta.url)("ringed")(), "ringed 1.0");
assert.equal(execFileSync("echo", ["child"]).toString(), "child\n");
const child = spawn("cat"); child.stdin.end("piped"); assert.equal(String(await once(child.stdout, "data")), "piped");
const worker = new Worker('require("node:worker_threads").parentPort.postMessage(6 * 7)', { eval: true });
assert.equal((await once(worker, "message"))[0], 42);
const server = net.createServer((end) => end.end("hello")).listen(0, "127.0.0.1"); await once(server, "listening");
assert.equal(String(await once(net.connect(server.address().port, "127.0.0.1"), "data")), "hello"); server.close();
await fs.promises.writeFile("packed", zlib.gzipSync(randomBytes(65536))); scryptSync("a", "b", 32);
assert.equal(zlib.gunzipSync(await fs.promises.readFile("packed")).length, 65536);
fs.watch(".").close();
JS
node main.mjs
echo "npm ok"
