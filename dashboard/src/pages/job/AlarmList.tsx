import { memo, useState } from 'react';
import type { Alarm } from './health';

// So many at first: rows that are out of sight are work at each alarm all the same.
const FIRST = 50;

/** The alarms of a job, newest first; one that is pressed is shown where it happened. */
export function AlarmList(props: {
  alarms: readonly Alarm[];
  /** What is said where there are none. */
  none: string;
  onPick: (alarm: Alarm) => void;
}) {
  const [whole, setWhole] = useState(false);
  const { alarms, onPick } = props;
  if (alarms.length === 0) {
    return <p className="muted">{props.none}</p>;
  }
  return (
    <>
      <ul className="alarms">
        {(whole ? alarms : alarms.slice(0, FIRST)).map((alarm) => (
          <AlarmRow key={alarm.seq} alarm={alarm} onPick={onPick} />
        ))}
      </ul>
      {!whole && alarms.length > FIRST && (
        <button type="button" className="button small" onClick={() => setWhole(true)}>
          Show {alarms.length - FIRST} older ones
        </button>
      )}
    </>
  );
}

/** Alarms do not change: one of the same number is the same. */
const AlarmRow = memo(
  function AlarmRow({ alarm, onPick }: { alarm: Alarm; onPick: (alarm: Alarm) => void }) {
    return (
      <li>
        <button
          type="button"
          className="button quiet small"
          title="Show it in the heatmap and the table"
          onClick={() => onPick(alarm)}
        >
          step {alarm.step.toLocaleString('en-US')}
        </button>
        <span>{alarm.message.replace(/^step \d+: /, '')}</span>
      </li>
    );
  },
  (one, other) => one.alarm.seq === other.alarm.seq && one.onPick === other.onPick,
);
