// Verifies one Sigstore bundle with Sigstore's own implementation and a given public key.
//
//   node verify.js BUNDLE.json PUBLIC.pem PAYLOAD-FILE
//
// Exit 0: the signature is good, and the signed payload was written to PAYLOAD-FILE. Exit 3: the
// verifier rejects the bundle (its code on standard error). Anything else: this script is broken.
"use strict";

const crypto = require("node:crypto");
const fs = require("node:fs");
const { bundleFromJSON } = require("@sigstore/bundle");
const { toSignedEntity, Verifier } = require("@sigstore/verify");

const [bundlePath, keyPath, payloadPath] = process.argv.slice(2);
const key = crypto.createPublicKey(fs.readFileSync(keyPath));
const spki = key.export({ type: "spki", format: "der" });
const hint = crypto.createHash("sha256").update(spki).digest("base64");

class UnknownHint extends Error {}

const trust = {
  certificateAuthorities: [],
  timestampAuthorities: [],
  tlogs: [],
  ctlogs: [],
  publicKey(wanted) {
    if (wanted !== hint) {
      throw new UnknownHint(`no key for the hint ${wanted}`);
    }
    return { publicKey: key, validFor: () => true };
  },
};
const thresholds = { tlogThreshold: 0, ctlogThreshold: 0, timestampThreshold: 0, tsaThreshold: 0 };
const text = fs.readFileSync(bundlePath, "utf8");

let bundle;
try {
  bundle = bundleFromJSON(JSON.parse(text));
  new Verifier(trust, thresholds).verify(toSignedEntity(bundle));
} catch (error) {
  const known = ["SIGNATURE_ERROR", "PUBLIC_KEY_ERROR", "UNTRUSTED_SIGNER_ERROR"];
  const rejected =
    error instanceof UnknownHint ||
    error instanceof SyntaxError ||
    error.name === "ValidationError" ||
    known.includes(error.code);
  console.error(`${error.code || error.constructor.name}: ${error.message}`);
  process.exit(rejected ? 3 : 1);
}
if (bundle.content.$case !== "dsseEnvelope") {
  console.error("the bundle holds no DSSE envelope");
  process.exit(3);
}
fs.writeFileSync(payloadPath, bundle.content.dsseEnvelope.payload);
