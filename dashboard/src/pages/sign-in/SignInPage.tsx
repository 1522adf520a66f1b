import { type FormEvent, useEffect, useRef, useState } from 'react';
import { ApiError, advice } from '~/api/problem';
import { useSignIn } from '~/app/session';

/** Asks for an API key and exchanges it for a cookie that scripts cannot read. */
export default function SignInPage() {
  const signIn = useSignIn();
  const [key, setKey] = useState('');
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  // There is nothing else to do here.
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);

  async function submit(event: FormEvent) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await signIn(key.trim());
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }

  return (
    <main className="sign-in">
      <form className="card sign-in-card" onSubmit={(event) => void submit(event)}>
        <h1 className="brand large">
          <img src={`${import.meta.env.BASE_URL}octrain.svg`} alt="" width="36" height="36" />
          Octrain
        </h1>
        <p className="muted">Sign in with an API key to see your jobs.</p>
        <label className="field">
          <span className="field-label">API key</span>
          <input
            ref={field}
            className="input"
            type="password"
            name="key"
            autoComplete="current-password"
            spellCheck={false}
            required
            placeholder="oct_…"
            value={key}
            onChange={(event) => setKey(event.target.value)}
            aria-invalid={error !== null}
            aria-describedby="sign-in-help"
          />
        </label>
        {error !== null && (
          <p role="alert" className="form-error">
            {error instanceof ApiError && error.status === 401
              ? 'This key is unknown, expired or revoked.'
              : `${error instanceof Error ? error.message : 'It failed.'} ${advice(error)}`}
          </p>
        )}
        <button type="submit" className="button primary" disabled={busy || key.trim() === ''}>
          {busy ? 'Signing in…' : 'Sign in'}
        </button>
        <p id="sign-in-help" className="hint">
          <code>octrain up</code> prints the first key; later ones are made by an administrator with{' '}
          <code>octrain keys create</code>. The key is exchanged for a cookie that no script can
          read.
        </p>
      </form>
    </main>
  );
}
