import { useQuery } from '@tanstack/react-query';
import { useEffect, useId, useState } from 'react';
import { readJson } from '~/pages/job/useJob';

interface Found {
  id: string;
  name: string | null;
  status: string;
}

/** Searches a job by name or id; what is chosen is told once. */
export function JobPicker({
  chosen,
  onAdd,
}: {
  chosen: readonly string[];
  onAdd: (id: string) => void;
}) {
  const [text, setText] = useState('');
  const [asked, setAsked] = useState('');
  const list = useId();
  useEffect(() => {
    const timer = setTimeout(() => setAsked(text.trim()), 250);
    return () => clearTimeout(timer);
  }, [text]);
  const query = useQuery({
    queryKey: ['jobs', 'picker', asked],
    queryFn: ({ signal }) => {
      const search = new URLSearchParams({ limit: '12', fields: 'name,status' });
      if (asked !== '') search.set('q', asked);
      return readJson<{ items: Found[] }>(`/v1/jobs?${search}`, signal);
    },
  });
  const found = (query.data?.items ?? []).filter(({ id }) => !chosen.includes(id));

  function choose(value: string) {
    setText(value);
    const job = found.find(({ id }) => value === id);
    if (job) {
      onAdd(job.id);
      setText('');
    }
  }

  return (
    <span className="row">
      <input
        className="input picker"
        type="search"
        list={list}
        aria-label="Add a job by name or id"
        placeholder="Add a job by name or id"
        value={text}
        onChange={(event) => choose(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === 'Enter' && found[0]) choose(found[0].id);
        }}
      />
      <datalist id={list}>
        {found.map(({ id, name, status }) => (
          <option key={id} value={id}>
            {`${name ?? id}, ${status}`}
          </option>
        ))}
      </datalist>
    </span>
  );
}
