import { useCallback, useRef } from 'react';

/** 128 random bits, also where a page without TLS has no `crypto.randomUUID`. */
function newKey(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, '0'),
  ).join('');
}

/**
 * Idempotency keys of what one part of the page sends: of the same request the same. When an answer
 * was lost, and somebody sends again, nothing is made twice.
 */
export function useIdempotencyKey(): (request: string) => string {
  const held = useRef({ request: '', key: '' });
  return useCallback((request) => {
    if (held.current.key === '' || held.current.request !== request)
      held.current = { request, key: newKey() };
    return held.current.key;
  }, []);
}
