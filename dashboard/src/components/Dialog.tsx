import { type ReactNode, useEffect, useId, useRef } from 'react';

/** A modal window: the browser's own dialog, so focus and Escape are its affair. */
export function Dialog(props: {
  title: string;
  onClose: () => void;
  children: ReactNode;
  actions?: ReactNode;
  wide?: boolean;
}) {
  const element = useRef<HTMLDialogElement>(null);
  const title = useId();
  useEffect(() => {
    const dialog = element.current;
    if (dialog && !dialog.open) dialog.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog
      ref={element}
      className={props.wide ? 'dialog wide' : 'dialog'}
      aria-labelledby={title}
      onCancel={(event) => {
        event.preventDefault();
        props.onClose();
      }}
    >
      <h2 id={title} className="dialog-title">
        {props.title}
      </h2>
      <div className="dialog-body">{props.children}</div>
      {props.actions && <div className="dialog-actions">{props.actions}</div>}
    </dialog>
  );
}

/** Asks before something that cannot be undone. */
export function ConfirmDialog(props: {
  title: string;
  children: ReactNode;
  confirm: string;
  busy?: boolean;
  onConfirm: () => void;
  onClose: () => void;
}) {
  return (
    <Dialog
      title={props.title}
      onClose={props.onClose}
      actions={
        <>
          <button type="button" className="button" onClick={props.onClose}>
            Back
          </button>
          <button
            type="button"
            className="button danger"
            disabled={props.busy}
            onClick={props.onConfirm}
          >
            {props.confirm}
          </button>
        </>
      }
    >
      {props.children}
    </Dialog>
  );
}
