import { createContext, useContext } from 'react';
import type { Json, JsonObject, Path, Schema } from './schema';

/** What all fields of one form share. */
export interface Form {
  root: Schema;
  spec: JsonObject;
  /** Sets the value at a place; `undefined` leaves it to the default. */
  change: (path: Path, value: Json | undefined) => void;
  /** What the service says of a place, by JSON pointer. */
  problems: ReadonlyMap<string, string>;
}

export const FormContext = createContext<Form | null>(null);

/** The form that a field stands in. */
export function useForm(): Form {
  const form = useContext(FormContext);
  if (form === null) throw new Error('a field stands outside of its form');
  return form;
}
