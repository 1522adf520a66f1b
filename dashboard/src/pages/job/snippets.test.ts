import { describe, expect, it } from 'vitest';
import { asCommand, asCurl, asPython, literal } from './snippets';

const spec = {
  name: "it's",
  recipe: { engine: 'te', interval: 1, flags: [true, false, null] },
  model: {},
};

describe('copies of a job', () => {
  it('hands the spec to curl through a document that no shell changes', () => {
    const text = asCurl(spec, 'https://octrain.example');
    expect(text).toContain('curl -sS --fail-with-body https://octrain.example/v1/jobs');
    expect(text).toContain("<<'END_OF_SPEC'");
    const body = text.split("<<'END_OF_SPEC'\n")[1]?.replace(/\nEND_OF_SPEC$/, '');
    expect(JSON.parse(body ?? '')).toEqual(spec);
  });
  it('has no key in it', () => expect(asCurl(spec, 'http://x')).toContain('$OCTRAIN_API_KEY'));
  it('calls the command', () => {
    expect(asCommand(spec, 'http://x')).toMatch(
      /^octrain --url http:\/\/x submit -f - <<'END_OF_SPEC'\n/,
    );
  });
  it('writes Python', () => {
    expect(asPython({ a: true, b: null }, 'http://x')).toContain(
      'client.jobs.create({\n    "a": True,\n    "b": None,\n})',
    );
  });
});

describe('literal', () => {
  it('nests', () => {
    expect(literal(spec, 0)).toBe(
      '{\n    "name": "it\'s",\n    "recipe": {\n        "engine": "te",\n        "interval": 1,\n' +
        '        "flags": [True, False, None],\n    },\n    "model": {},\n}',
    );
  });
});
