// Elements. Text is always put in as text: nothing that a model or a user says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== false));
  return element;
}

export function make(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function draw(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

// A painter of one part of the page that paints only what has changed, so that a pointer or a reader is not disturbed.
export function painter(element, paint) {
  let painted = null;
  return (...values) => {
    const key = JSON.stringify(values);
    if (key === painted) return;
    painted = key;
    element.replaceChildren(...paint(...values).filter((child) => child));
  };
}
