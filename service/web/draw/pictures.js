// Pictures as files: PNG and SVG of a canvas, of an svg element, or of an element that has a canvas.

import { context2d, el, svg } from "../dom.js";

const MIN_PIXELS = 600; // small canvases are enlarged to about this width or height
const STYLES = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "text-anchor",
];

/**
 * A canvas or an svg, an element that has a canvas, or something that draws one of them for the occasion.
 * @typedef {HTMLCanvasElement | SVGSVGElement | (Element & { canvas: HTMLCanvasElement })} Drawn
 * @typedef {Drawn | { picture: () => Drawn | Promise<Drawn> }} Drawable
 */

/**
 * A picture as a Blob of PNG, on the colour of the page.
 * @param {Drawable} element
 * @returns {Promise<Blob | null>}
 */
export async function asPng(element) {
  const picture = await drawnOf(element);
  const isSvg = picture instanceof SVGElement;
  const source = isSvg ? await loaded(await asSvg(picture)) : picture;
  const [width, height] = [source.width, source.height];
  const factor = isSvg ? 2 : Math.max(1, Math.ceil(MIN_PIXELS / Math.max(width, height)));
  const canvas = el("canvas", { width: width * factor, height: height * factor });
  const context = context2d(canvas);
  context.fillStyle = pageColour();
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = isSvg;
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/**
 * A picture as a Blob of SVG. The pixels of a canvas become an image inside it.
 * @param {Drawable} element
 */
export async function asSvg(element) {
  const picture = await drawnOf(element);
  const text = new XMLSerializer().serializeToString(
    picture instanceof SVGElement ? copyWithStyles(picture) : wrapped(picture),
  );
  return new Blob([text], { type: "image/svg+xml" });
}

/**
 * The svg or canvas element of a picture. An element with a method `picture` draws one for the occasion.
 * @param {Drawable} element
 */
async function drawnOf(element) {
  const picture = "picture" in element ? await element.picture() : element;
  return "canvas" in picture ? picture.canvas : picture;
}

function pageColour() {
  return getComputedStyle(document.body).backgroundColor;
}

/**
 * A copy that looks the same without the style sheet of the page.
 * @param {SVGSVGElement} element
 */
function copyWithStyles(element) {
  const copy = /** @type {SVGSVGElement} */ (element.cloneNode(true));
  const [originals, copies] = [
    [element, ...element.querySelectorAll("*")],
    [copy, ...copy.querySelectorAll("*")],
  ];
  originals.forEach((original, index) => {
    if (!original.isConnected) return; // it has no style sheet
    const style = getComputedStyle(original);
    for (const name of STYLES) copies[index].setAttribute(name, style.getPropertyValue(name));
  });
  const box = element.getBoundingClientRect();
  const size = { width: Math.ceil(box.width), height: Math.ceil(box.height) };
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${size.width} ${size.height}`, ...size }))
    if (!copy.hasAttribute(name)) copy.setAttribute(name, String(value));
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: pageColour() }));
  return copy;
}

/** @param {HTMLCanvasElement} canvas */
function wrapped(canvas) {
  const { width, height } = canvas;
  return svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}` },
    svg("rect", { width, height, fill: pageColour() }),
    svg("image", { width, height, href: canvas.toDataURL("image/png") }),
  );
}

/**
 * An SVG file as an image that a canvas can draw.
 * @param {Blob} blob
 */
async function loaded(blob) {
  const address = URL.createObjectURL(blob);
  const image = new Image();
  image.src = address;
  await image.decode();
  URL.revokeObjectURL(address);
  return image;
}
