import { describe, expect, it } from 'vitest';
import { ApiError, advice, problemOf } from './problem';

describe('problemOf', () => {
  it('keeps what the problem document says', () => {
    const error = problemOf(422, {
      type: '/problems/spec-invalid',
      title: "The job's spec is not valid",
      status: 422,
      detail: 'training/steps: too many',
      errors: [{ pointer: '/training/steps', message: 'too many', code: 'max' }],
      request_id: 'req_1',
    });
    expect(error.message).toBe('training/steps: too many');
    expect(error.errors[0]?.pointer).toBe('/training/steps');
    expect(error.requestId).toBe('req_1');
  });
  it('makes do with an answer of something in between', () => {
    expect(problemOf(502, null).title).toBe('The service answered 502');
  });
});

describe('advice', () => {
  it('says what to do for every kind of failure', () => {
    const away = new ApiError({ status: 0, title: 'The service cannot be reached' });
    expect(away.offline).toBe(true);
    expect(advice(away)).toMatch(/network/);
    for (const status of [401, 403, 404, 409, 422, 429, 418]) {
      expect(advice(new ApiError({ status, title: 'x' }))).not.toBe('');
    }
    expect(advice(new ApiError({ status: 500, title: 'x', request_id: 'req_9' }))).toMatch(/req_9/);
    expect(advice(new TypeError('x'))).toMatch(/[Rr]eload/);
  });
});
