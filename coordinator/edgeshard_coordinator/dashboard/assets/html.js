// The one way to make elements: templates of htm over preact, which evaluate no text.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
