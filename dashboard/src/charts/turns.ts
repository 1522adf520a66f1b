/** Work of many charts, one piece a task: between two, the page answers whoever uses it. */

type Work = () => void;

const waiting: Work[] = [];
let running = false;

function next(): void {
  const work = waiting.shift();
  if (work === undefined) {
    running = false;
    return;
  }
  // What fails is told by the page's own handler of errors, and stops nobody else's turn.
  later(next);
  work();
}

// A message comes back as a task of its own, without the pause that timers have.
const channel = new MessageChannel();
channel.port1.onmessage = () => pending?.();
let pending: Work | null = null;
function later(work: Work): void {
  pending = work;
  channel.port2.postMessage(null);
}

/** Does the work soon, after what waits already; the answer takes it back. */
export function takeTurn(work: Work): () => void {
  waiting.push(work);
  if (!running) {
    running = true;
    later(next);
  }
  return () => {
    const place = waiting.indexOf(work);
    if (place >= 0) waiting.splice(place, 1);
  };
}
