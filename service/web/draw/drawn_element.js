// An element with a picture that depends on the theme, and on the width of the element.

/**
 * Classes override `build`, which creates the parts of the element once, `redraw`, and `resized` if another width needs
 * something else than `redraw`. All are called while the element is in the page, `redraw` also when it comes into it.
 */
export class DrawnElement extends HTMLElement {
  #width = 0;
  #redraw = () => this.redraw();
  #observer = new ResizeObserver(() => {
    const before = this.#width;
    this.#width = this.clientWidth;
    if (this.#width > 0 && this.#width !== before) this.resized();
  });

  connectedCallback() {
    if (this.childElementCount === 0) this.build();
    this.#width = this.clientWidth;
    addEventListener("themechange", this.#redraw);
    this.#observer.observe(this);
    this.redraw();
  }

  disconnectedCallback() {
    removeEventListener("themechange", this.#redraw);
    this.#observer.disconnect();
  }

  build() {}

  redraw() {}

  resized() {
    this.redraw();
  }
}
