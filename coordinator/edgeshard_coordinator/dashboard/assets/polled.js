// An answer of the coordinator that is requested again while its screen is open, and after each action of the screen.
import { useEffect, useState } from "./vendor/hooks.js";
import { ask } from "./calls.js";

const EVERY_MS = 3000;

// The newest answer (undefined before the first), the error of the last request if it failed, and a function that
// requests it at once.
export function usePolled(what) {
  const [state, setState] = useState({});
  const request = async () => {
    try {
      setState({ answer: await ask(what, {}) });
    } catch (error) {
      setState((before) => ({ ...before, error }));
    }
  };
  useEffect(() => {
    request();
    const timer = setInterval(() => document.hidden || request(), EVERY_MS);
    return () => clearInterval(timer);
  }, [what]);
  return [state.answer, state.error, request];
}
