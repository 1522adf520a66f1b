import { type ReactNode, useEffect, useId, useRef } from 'react';
import { ErrorState } from './states';

/** A modal window: the browser's own dialog. What had the focus before has it again afterwards. */
export function Dialog(props: {
  title: string;
  onClose: () => void;
  children: ReactNode;
  actions?: ReactNode;
  wide?: boolean;
  /** Makes it a form: by Enter in one of its fields, or a button that submits. */
  onSubmit?: () => void;
}) {
  const element = useRef<HTMLDialogElement>(null);
  const title = useId();
  useEffect(() => {
    const dialog = element.current;
    const before = document.activeElement;
    if (dialog && !dialog.open) dialog.showModal();
    return () => {
      dialog?.close();
      // The browser gives the focus back only while the dialog is still there.
      if (before instanceof HTMLElement && before.isConnected) before.focus();
    };
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
      <Frame onSubmit={props.onSubmit}>
        <h2 id={title} className="dialog-title">
          {props.title}
        </h2>
        <div className="dialog-body">{props.children}</div>
        {props.actions && <div className="dialog-actions">{props.actions}</div>}
      </Frame>
    </dialog>
  );
}

function Frame({
  onSubmit,
  children,
}: {
  onSubmit?: (() => void) | undefined;
  children: ReactNode;
}) {
  if (onSubmit === undefined) return children;
  return (
    <form
      // What is wrong the service says, with its reason.
      noValidate
      onSubmit={(event) => {
        event.preventDefault();
        onSubmit();
      }}
    >
      {children}
    </form>
  );
}

/** A dialog that is filled in and sent, or left. */
export function FormDialog(props: {
  title: string;
  submit: string;
  disabled: boolean;
  onSubmit: () => void;
  onClose: () => void;
  error?: unknown;
  /** Whether it cannot be undone. */
  danger?: boolean;
  /** Between leaving and sending: another way to send. */
  more?: ReactNode;
  children: ReactNode;
}) {
  return (
    <Dialog
      title={props.title}
      onClose={props.onClose}
      onSubmit={props.onSubmit}
      actions={
        <>
          <button type="button" className="button" onClick={props.onClose}>
            Back
          </button>
          {props.more}
          <button
            type="submit"
            className={props.danger ? 'button danger' : 'button primary'}
            disabled={props.disabled}
          >
            {props.submit}
          </button>
        </>
      }
    >
      {props.children}
      {props.error != null && <ErrorState error={props.error} />}
    </Dialog>
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
    <FormDialog
      title={props.title}
      submit={props.confirm}
      danger
      disabled={props.busy ?? false}
      onSubmit={props.onConfirm}
      onClose={props.onClose}
    >
      {props.children}
    </FormDialog>
  );
}
