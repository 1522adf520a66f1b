/** Which rows give a column its width, whichever of them are in view. */

/** The longest of these texts, and the one with the longest word: how wide they need not and must be. */
export function widest(texts: readonly string[]): number[] {
  let [text, word, longestText, longestWord] = [0, 0, -1, -1];
  texts.forEach((each, index) => {
    const words = Math.max(...each.split(' ').map(({ length }) => length));
    if (each.length > longestText) [text, longestText] = [index, each.length];
    if (words > longestWord) [word, longestWord] = [index, words];
  });
  return texts.length === 0 ? [] : [text, word];
}
