/** A text whose parts between backticks are shown as code, as the service writes names. */
export function Words({ text }: { text: string }) {
  return text.split('`').map((part, index) => {
    // biome-ignore lint/suspicious/noArrayIndexKey: the parts of a text stay where they are
    return index % 2 === 1 ? <code key={index}>{part}</code> : part;
  });
}
