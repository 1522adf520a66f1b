import { keepPreviousData, useQuery } from '@tanstack/react-query';
import { useEffect, useState } from 'react';
import { request, type Schemas } from '~/api/client';
import { ApiError } from '~/api/problem';
import type { JsonObject } from './schema';

export type Report = Schemas['ValidationReport'];

/** The value once it has not changed for so many milliseconds. */
function useSettled<T>(value: T, milliseconds: number): T {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), milliseconds);
    return () => clearTimeout(timer);
  }, [value, milliseconds]);
  return settled;
}

async function validate(text: string, signal: AbortSignal): Promise<Report> {
  try {
    const answer = await request('/v1/jobs:validate?wait=0', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: text,
      signal,
    });
    return (await answer.json()) as Report;
  } catch (error) {
    // What is too large or too deep is refused before it is looked at: told like any mistake.
    if (error instanceof ApiError && (error.status === 422 || error.status === 413)) {
      const errors =
        error.errors.length > 0
          ? [...error.errors]
          : [{ pointer: '', message: error.message, code: 'refused' }];
      return {
        valid: false,
        errors,
        warnings: [],
        nodes: [],
        plan: null,
        plan_detail: null,
        plan_status: 'unavailable',
        recipe_from: null,
        spec: null,
        time: null,
      };
    }
    throw error;
  }
}

/** What the service thinks of the spec, asked whenever it has been left alone for a moment. */
export function useValidation(spec: JsonObject) {
  const text = useSettled(JSON.stringify(spec), 350);
  const query = useQuery({
    queryKey: ['validate', text],
    queryFn: ({ signal }) => validate(text, signal),
    placeholderData: keepPreviousData,
    staleTime: 10_000,
    gcTime: 60_000,
    // A node may still be making the plan.
    refetchInterval: ({ state }) => (state.data?.plan_status === 'pending' ? 2000 : false),
  });
  const isCurrent = text === JSON.stringify(spec) && !query.isPlaceholderData;
  return { report: query.data, error: query.error, refetch: query.refetch, isCurrent };
}
