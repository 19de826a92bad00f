// Light, dark, or as the system has it. Not here: the colours (page.css).

const KEY = "ca_jax.theme";
const NEXT = { "": "light", light: "dark", dark: "" };
const NAMES = { "": "system", light: "light", dark: "dark" };

export function themed(button) {
  const show = () => {
    const theme = localStorage.getItem(KEY) ?? "";
    document.documentElement.style.colorScheme = theme;
    button.textContent = `Theme: ${NAMES[theme] ?? "system"}`;
  };
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, NEXT[localStorage.getItem(KEY) ?? ""] ?? "");
    show();
  });
  show();
}
