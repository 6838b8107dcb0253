/** The menu of the playground that copies or downloads the conversation. */

import { before } from "./chat.js";
import { copyText } from "./clipboard.js";
import { byId, element } from "./dom.js";
import { markdown } from "./exports.js";
import { key } from "./keys.js";
import { curlOf } from "./recipes.js";

const DOWNLOAD_MS_MAX = 10_000;

/** @param conversation returns {turns, system, request(turns)} */
export function start(conversation) {
  const menu = byId("export");
  const on = (id, act) => byId(id).addEventListener("click", (event) => act(conversation(), event.currentTarget));
  on("export-curl", ({ turns, request }, button) => {
    const asked = turns.at(-1)?.role === "assistant" ? before(turns) : turns;
    copyText(button, curlOf(location.origin, key(), "/v1/chat/completions", request(asked)));
  });
  on("export-markdown", ({ turns, system }) => download("conversation.md", "text/markdown", markdown(turns, system)));
  on("export-json", ({ turns, request }) => {
    download("conversation.json", "application/json", JSON.stringify(request(turns), null, 2));
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  menu.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !menu.contains(relatedTarget)) menu.open = false;
  });
  document.addEventListener("pointerdown", ({ target }) => { if (!menu.contains(target)) menu.open = false; });
}

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), DOWNLOAD_MS_MAX);
}
