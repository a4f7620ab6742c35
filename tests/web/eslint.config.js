// Rules for mistakes. Prettier decides the format, and tsc finds unknown names.
import js from "@eslint/js";

export default [
  js.configs.recommended,
  {
    rules: {
      "no-undef": "off", // tsc knows the names of the browser
      "no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
      "no-shadow": ["error", { allow: ["_"] }],
      "array-callback-return": "error",
      "consistent-return": "error",
      eqeqeq: "error",
      "no-console": ["error", { allow: ["error"] }],
      "no-else-return": "error",
      "no-implied-eval": "error",
      "no-self-compare": "error",
      "no-template-curly-in-string": "error",
      "no-throw-literal": "error",
      "no-unmodified-loop-condition": "error",
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
];
