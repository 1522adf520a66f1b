/** Boxes to tick, each with what it means. */
export function Choices<Name extends string>(props: {
  label: string;
  choices: readonly (readonly [name: Name, meaning: string])[];
  chosen: readonly Name[];
  onToggle: (name: Name, on: boolean) => void;
}) {
  return (
    <fieldset className="plain-fieldset">
      <legend className="field-label">{props.label}</legend>
      {props.choices.map(([name, meaning]) => (
        <label key={name} className="check wrap">
          <input
            type="checkbox"
            checked={props.chosen.includes(name)}
            onChange={(event) => props.onToggle(name, event.target.checked)}
          />
          <span>
            <code>{name}</code> <span className="hint">{meaning}</span>
          </span>
        </label>
      ))}
    </fieldset>
  );
}
