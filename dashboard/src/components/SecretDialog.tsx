import type { ReactNode } from 'react';
import { CopyButton } from './CopyButton';
import { Dialog } from './Dialog';

/** A secret that is seen this once. */
export function SecretDialog(props: {
  title: string;
  secret: string;
  copy: string;
  onClose: () => void;
  children: ReactNode;
}) {
  return (
    <Dialog
      title={props.title}
      onClose={props.onClose}
      actions={
        <>
          <CopyButton text={props.secret} label={props.copy} />
          <button type="button" className="button primary" onClick={props.onClose}>
            I have kept it
          </button>
        </>
      }
    >
      <p>{props.children}</p>
      <p>
        <code className="secret">{props.secret}</code>
      </p>
    </Dialog>
  );
}
