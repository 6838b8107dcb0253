/** Images for the next message: chosen, dropped or pasted; stored as data URLs, large ones scaled down. */

import { byId, element, keep } from "./dom.js";

const SIDE_MAX = 2048;
const IMAGES_MAX = 8;
let images = [];

/** Return the images to send and clear the list. */
export function taken() {
  const given = images.map((image) => image.url);
  images = [];
  show();
  return given;
}

export function start(dropZone) {
  byId("file").addEventListener("change", (event) => add(event.target.files).then(() => { event.target.value = ""; }));
  byId("prompt").addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) event.preventDefault();
    add(event.clipboardData.files);
  });
  dropZone.addEventListener("dragover", (event) => { event.preventDefault(); dropZone.classList.add("over"); });
  dropZone.addEventListener("dragleave", () => dropZone.classList.remove("over"));
  dropZone.addEventListener("drop", (event) => {
    event.preventDefault();
    dropZone.classList.remove("over");
    add(event.dataTransfer.files);
  });
}

async function add(files) {
  for (const file of [...files].filter((each) => each.type.startsWith("image/"))) {
    const url = await sized(await dataUrl(file));
    images = [...images, { key: crypto.randomUUID?.() ?? String(Math.random()), url, name: file.name }].slice(-IMAGES_MAX);
  }
  show();
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror: () => reject(reader.error) });
  reader.readAsDataURL(file);
});

async function sized(url) {
  const image = Object.assign(new Image(), { src: url });
  await image.decode().catch(() => {}); // the server may read formats that the browser cannot display
  const scale = SIDE_MAX / Math.max(image.naturalWidth, image.naturalHeight, 1);
  if (scale >= 1) return url;
  const canvas = element("canvas", { width: image.naturalWidth * scale, height: image.naturalHeight * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function show() {
  keep(byId("images"), images, make, () => {});
}

function make({ key, url, name }) {
  const drop = () => { images = images.filter((image) => image.key !== key); show(); byId("prompt").focus(); };
  const button = element("button", { type: "button", className: "quiet", ariaLabel: `Remove ${name}`, onclick: drop }, "×");
  return element("li", {}, element("img", { src: url, alt: name }), button);
}
