// An answer of the coordinator that is requested again while its screen is open, and after each action of the screen.
import { useEffect, useState } from "./vendor/hooks.js";
import { ask } from "./calls.js";

const EVERY_MS = 3000;
const REST = 50; // a request that took long is repeated after this multiple of its time

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
    let timer = 0;
    let isOpen = true;
    const poll = async () => {
      const began = performance.now();
      if (!document.hidden) await request();
      if (isOpen) timer = setTimeout(poll, Math.max(EVERY_MS, REST * (performance.now() - began)));
    };
    poll();
    return () => {
      isOpen = false;
      clearTimeout(timer);
    };
  }, [what]);
  return [state.answer, state.error, request];
}
