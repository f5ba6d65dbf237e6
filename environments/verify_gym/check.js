#!/usr/bin/env node
// The second decider of verify-gym: the same questions as the Python package, answered by other means and by none of its code.
//
//   node check.js [--exact] < answers.jsonl        one JSON object a line in, one a line out, in order
//   node check.js --conformance conformance.jsonl  judge the published cases; exit 1 if one is judged otherwise
//
// In:  {"id": any, "task": row, "reply": text, "truncated": bool}
// Out: {"id", "verdict", "lo", "hi", "decimals", "progress"}, or {"id", "error"} where the row is no admissible task.
// In a row every integer is a decimal string, because a JSON number is exact only up to 2^53.
//
//           Python package                      here
//   text    one regular expression              a scanner, character by character
//   x^x     interval powers                     fixed-point logarithms with an error bound (--exact: whole powers)
//   poly    Descartes' rule, sign at the bar    Sturm's theorem for the isolation and for each side
//   k-th root: p^k against n q^k in both; there is no shorter question to ask.
"use strict";

class RowFault extends Error {}

const abs = (n) => (n < 0n ? -n : n);
const sign = (n) => (n > 0n) - (n < 0n);
const gcd = (a, b) => { a = abs(a); b = abs(b); while (b) [a, b] = [b, a % b]; return a; };
const fraction = (p, q) => { const g = gcd(p, q); return { p: p / g, q: q / g }; };  // q > 0
const order = (x, y) => sign(x.p * y.q - y.p * x.q);

// ---- the reply -------------------------------------------------------------------------------------------------------

const MAX_BODY = 400, MAX_DIGITS = 80;

/** The text of the last answer, or null. Thinking that was opened and never closed leaves no answer. */
function answerBody(reply) {
  if (typeof reply !== "string") return null;
  const text = reply.slice(reply.lastIndexOf("</think>") + 1 ? reply.lastIndexOf("</think>") + 8 : 0);
  if (text.includes("<think>")) return null;
  const open = text.lastIndexOf("<answer>");
  if (open < 0) return null;
  const close = text.indexOf("</answer>", open + 8);
  if (close < 0 || close - open - 8 > MAX_BODY) return null;
  return text.slice(open + 8, close);
}

/** Reads  WS RAT WS "," WS RAT WS  and nothing else. */
class Scanner {
  constructor(text) { this.text = text; this.at = 0; }

  spaces() { while (this.at < this.text.length && " \t\r\n".includes(this.text[this.at])) this.at++; }

  take(char) { if (this.text[this.at] !== char) return false; this.at++; return true; }

  digits() {
    const from = this.at;
    while (this.text[this.at] >= "0" && this.text[this.at] <= "9") this.at++;
    return this.text.slice(from, this.at);
  }

  /** The value of one end, or null; what is too long is never converted. */
  rational() {
    this.spaces();
    const negative = this.take("-");
    let top = this.digits(), bottom = "1";
    if (!top) return null;
    const mark = this.take("/") ? "/" : this.take(".") ? "." : "";
    if (mark) {
      const rest = this.digits();
      if (!rest) return null;
      if (mark === "/") bottom = rest;
      else { top += rest; bottom = "1" + "0".repeat(rest.length); }
    }
    this.spaces();
    if (top.length > MAX_DIGITS || bottom.length > MAX_DIGITS) return null;
    const p = BigInt(top), q = BigInt(bottom);
    return q === 0n ? null : fraction(negative ? -p : p, q);
  }
}

/** {lo, hi} of a readable answer with lo < hi inside the size limit, or null. */
function readAnswer(reply, limit) {
  const body = answerBody(reply);
  if (body === null) return null;
  const scan = new Scanner(body);
  const lo = scan.rational();
  if (lo === null || !scan.take(",")) return null;
  const hi = scan.rational();
  if (hi === null || scan.at !== body.length) return null;
  for (const end of [lo, hi]) if (abs(end.p) > limit || end.q > limit) return null;
  return order(lo, hi) < 0 ? { lo, hi } : null;
}

// ---- x^x = n ---------------------------------------------------------------------------------------------------------

const BITS = 192n;

/** ln(a/b) as {value, error}: |2^192 ln(a/b) - value| <= error. Needs a >= b > 0.
 *
 * ln(a/b) = e ln 2 + 2 atanh(z) with a/b = 2^e m, 1 <= m < 2, z = (m - 1)/(m + 1) <= 1/3, atanh z = z + z^3/3 + z^5/5 + ...
 * In units of 2^-192 the rounded z is off by less than 1 and the rounded z^2 by less than 2, so a power t is off by
 * less than 2 (t' = t z^2 takes an error E to at most E/9 + 2/3 + 1) and a term t/(2i + 1) by less than 3. A term is
 * nonzero only while z^(2i+1) > 2^-192, so there are at most 62, and the tail after them is below 4: under 200 in
 * all, under 400 after doubling. 512 a logarithm is what is charged, once for m and once for each ln 2.
 */
function logarithm(a, b) {
  let e = BigInt(a.toString(2).length - b.toString(2).length);
  if (a < b << e) e--;
  const value = 2n * atanh(a - (b << e), a + (b << e)) + e * LN2;
  return { value, error: 512n * (1n + e) };
}

function atanh(above, below) {
  const z = (above << BITS) / below, square = (z * z) >> BITS;
  let sum = 0n, power = z;
  for (let odd = 1n; power > 0n; odd += 2n) {
    sum += power / odd;
    power = (power * square) >> BITS;
  }
  return sum;
}

const LN2 = 2n * atanh(1n, 3n);

/** +1 where the root of x^x = n is above the bar, -1 below, 0 on it, null where the bar is below 1. */
function sideXx({ n }, exact) {
  const right = logarithm(n, 1n), known = new Map();  // whole powers take a tenth of a second: never the same ones twice
  const powers = (p, q) => {
    const key = `${p}/${q}`;
    if (!known.has(key)) known.set(key, sign(n ** q * q ** p - p ** p));
    return known.get(key);
  };
  return ({ p, q }) => {
    if (p < q) return null;
    if (exact) return powers(p, q);
    const left = logarithm(p, q);
    const gap = q * right.value - p * left.value;
    return abs(gap) > q * right.error + p * left.error ? sign(gap) : powers(p, q);
  };
}

// ---- k-th root -------------------------------------------------------------------------------------------------------

function sideKroot({ n, k }) {
  return ({ p, q }) => (p <= 0n ? null : sign(n * q ** k - p ** k));
}

// ---- polynomial ------------------------------------------------------------------------------------------------------

const trim = (a) => { while (a.length && a[a.length - 1] === 0n) a.pop(); return a; };

const primitive = (a) => { const g = a.reduce(gcd, 0n); return g > 1n ? a.map((c) => c / g) : a; };

/** -(a mod b) times some positive number; coefficients ascend. */
function negatedRemainder(a, b) {
  const lead = b[b.length - 1], positive = abs(lead), flip = BigInt(sign(lead));
  let rest = a.slice();
  while (rest.length >= b.length) {
    const top = rest[rest.length - 1] * flip, shift = rest.length - b.length;
    rest = rest.map((c) => c * positive);
    b.forEach((c, i) => { rest[shift + i] -= top * c; });
    trim(rest);
  }
  return primitive(rest.map((c) => -c));
}

function sturmChain(poly) {
  const chain = [primitive(poly), primitive(poly.slice(1).map((c, i) => c * BigInt(i + 1)))];
  while (chain[chain.length - 1].length > 1) {
    const next = negatedRemainder(chain[chain.length - 2], chain[chain.length - 1]);
    if (!next.length) break;
    chain.push(next);
  }
  return chain;
}

function signAt(poly, { p, q }) {
  let total = 0n, weight = 1n;
  for (let i = poly.length - 1; i >= 0; i--, weight *= q) total = total * p + poly[i] * weight;
  return sign(total);
}

function changes(chain, x) {
  const signs = chain.map((poly) => signAt(poly, x)).filter((s) => s !== 0);
  return signs.reduce((count, s, i) => count + (i > 0 && s !== signs[i - 1]), 0);
}

/** The number of distinct roots in (from, to), neither of which is a root. */
const rootsBetween = (chain, from, to) => changes(chain, from) - changes(chain, to);

/** Sturm's theorem twice: one root in (low, high) admits the row; one root in (low, bar) means that x < bar. */
function sidePoly({ coefficients }, exact, low, high) {
  const fault = (why) => { throw new RowFault(`the root is not isolated: ${why}`); };
  if (!signAt(coefficients, low) || !signAt(coefficients, high)) fault("an end is a root");
  if (signAt(coefficients, low) === signAt(coefficients, high)) fault("no opposite signs at the ends");
  const chain = sturmChain(coefficients);
  if (rootsBetween(chain, low, high) !== 1) fault("not exactly one root");
  const common = chain[chain.length - 1];  // of P and P': its roots are the multiple roots of P
  if (common.length > 1 && rootsBetween(sturmChain(common), low, high)) fault("a multiple root");
  const before = changes(chain, low);
  return (bar) => {
    if (order(bar, low) < 0 || order(bar, high) > 0) return null;
    if (!signAt(coefficients, bar)) return 0;
    return before - changes(chain, bar) === 1 ? -1 : 1;
  };
}

// ---- rows ------------------------------------------------------------------------------------------------------------

const FAMILIES = {
  xx: { side: sideXx, limit: 10n ** 5n, cap: 8, ranges: { n: [2n, 10n ** 12n] } },
  kroot: { side: sideKroot, limit: 10n ** 30n, cap: 20, ranges: { n: [1n, 10n ** 100n], k: [2n, 100n] } },
  poly: { side: sidePoly, limit: 10n ** 30n, cap: 20, ranges: { coefficients: [-(10n ** 100n), 10n ** 100n] } },
};

function whole(text) {
  if (typeof text !== "string" || !/^(?:0|-?[1-9][0-9]{0,399})$/.test(text)) throw new RowFault("no integer of a row");
  return BigInt(text);
}

function stated(text) {
  const parts = typeof text === "string" ? text.split("/") : [];
  if (parts.length < 1 || parts.length > 2) throw new RowFault("no rational of a row");
  const p = whole(parts[0]), q = parts.length === 2 ? whole(parts[1]) : 1n;
  if (q < 1n || gcd(p, q) !== 1n || (parts.length === 2 && q === 1n)) throw new RowFault("no rational in lowest terms");
  return { p, q };
}

function parameters(params, ranges) {
  const names = Object.keys(ranges).sort().join();
  if (!params || Object.keys(params).sort().join() !== names) throw new RowFault(`parameters other than ${names}`);
  const values = {};
  for (const [name, [least, most]] of Object.entries(ranges)) {
    const list = name === "coefficients";
    if (Array.isArray(params[name]) !== list) throw new RowFault(`${name} has the wrong shape`);
    const read = [params[name]].flat().map(whole);
    if (read.some((value) => value < least || value > most)) throw new RowFault(`${name} out of range`);
    values[name] = list ? read : read[0];
  }
  const poly = values.coefficients;
  if (poly && (poly.length < 2 || poly.length > 41 || !poly[poly.length - 1])) throw new RowFault("degree out of range");
  return values;
}

const remembered = new Map();

/** {side, d0, limit, cap} of a row, made once for all answers to it. */
function admit(row, exact) {
  const key = JSON.stringify(row) + exact;
  if (remembered.has(key)) return remembered.get(key);
  const family = row && Object.hasOwn(FAMILIES, row.family) ? FAMILIES[row.family] : null;
  if (!family) throw new RowFault("no such family");
  const params = parameters(row.params, family.ranges), low = stated(row.low), high = stated(row.high);
  if (order(low, high) >= 0) throw new RowFault("the stated ends are out of order");
  const made = { ...family, side: family.side(params, exact, low, high), d0: decimals(low, high) };
  if (remembered.size > 2000) remembered.clear();
  remembered.set(key, made);
  return made;
}

// ---- the decision ----------------------------------------------------------------------------------------------------

/** The most decimals k with hi - lo <= 10^-k, at least 0. */
function decimals(lo, hi) {
  const width = hi.p * lo.q - lo.p * hi.q, unit = lo.q * hi.q;
  let k = 0;
  for (let power = 10n; width * power <= unit; power *= 10n) k++;
  return k;
}

const word = (side, wanted) => (side === null ? "REFUSED" : side === wanted ? "CERTIFIED" : "REFUTED");

function decide({ task, reply, truncated }, exact = false) {
  const { side, d0, limit, cap } = admit(task, exact);
  const answer = truncated ? null : readAnswer(reply, limit);
  if (!answer) return { verdict: "MALFORMED", lo: null, hi: null, decimals: null, progress: 0 };
  const lo = word(side(answer.lo), 1), hi = word(side(answer.hi), -1), both = [lo, hi];
  const verdict = both.includes("REFUTED") ? "REFUTED" : both.includes("REFUSED") ? "REFUSED" : "CERTIFIED";
  const d = decimals(answer.lo, answer.hi);
  const progress = verdict === "CERTIFIED" ? Math.min(cap, Math.max(0, d - d0)) : 0;
  return { verdict, lo, hi, decimals: d, progress };
}

function decideLine(line, exact) {
  let item;
  try { item = JSON.parse(line); } catch { return { id: null, error: "no JSON object" }; }
  if (item === null || typeof item !== "object") return { id: null, error: "no JSON object" };
  const id = item.id ?? null;
  try { return { id, ...decide(item, exact) }; } catch (fault) {
    if (!(fault instanceof RowFault)) throw fault;
    return { id, error: fault.message };
  }
}

// ---- the command -----------------------------------------------------------------------------------------------------

/** Answers line by line as they come, so that a caller may wait for one before it sends the next. */
function serve(exact) {
  let pieces = [];
  const answer = (line) => process.stdout.write(JSON.stringify(decideLine(line, exact)) + "\n");
  process.stdin.setEncoding("utf8");
  process.stdin.on("data", (chunk) => {
    const lines = chunk.split("\n");
    pieces.push(lines[0]);
    if (lines.length === 1) return;
    lines[0] = pieces.join("");
    pieces = [lines.pop()];
    process.stdout.cork();
    lines.filter(Boolean).forEach(answer);
    process.stdout.uncork();
  });
  process.stdin.on("end", () => { const last = pieces.join(""); if (last) answer(last); });
}

/** Judge every case of a conformance file; returns the exit status. */
function conformance(path, exact) {
  const rows = new Map();
  let cases = 0, wrong = 0;
  for (const line of require("fs").readFileSync(path, "utf8").split("\n").filter(Boolean)) {
    const item = JSON.parse(line);
    if (item.row) rows.set(item.id, item.row);
    if (!item.expect) continue;
    cases++;
    const found = decideLine(JSON.stringify({ ...item, task: rows.get(item.task) }), exact);
    const same = item.expect.error ? "error" in found : Object.keys(item.expect).every((k) => found[k] === item.expect[k]);
    if (same) continue;
    wrong++;
    console.log(`${item.id}: expected ${JSON.stringify(item.expect)}, found ${JSON.stringify(found)}`);
  }
  console.log(`${cases} cases · ${wrong} judged otherwise`);
  return cases && !wrong ? 0 : 1;
}

function main(args) {
  const exact = args.includes("--exact"), rest = args.filter((arg) => arg !== "--exact");
  if (rest.length === 2 && rest[0] === "--conformance") process.exitCode = conformance(rest[1], exact);
  else if (!rest.length) serve(exact);
  else { console.error("usage: node check.js [--exact] [--conformance FILE]"); process.exitCode = 2; }
}

main(process.argv.slice(2));
