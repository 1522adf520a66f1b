import { useQuery } from '@tanstack/react-query';
import { request, type Schemas } from '~/api/client';
import { ErrorState, Loading } from '~/components/states';
import { Words } from '~/components/Words';
import { isObject, type Json, type JsonObject } from './schema';

type Recipe = Schemas['RecipeObject'];

async function readRecipes(signal: AbortSignal): Promise<Recipe[]> {
  const answer = await request('/v1/recipes?limit=200', { signal });
  return ((await answer.json()) as Schemas['RecipeList']).items;
}

/** Whether all that the recipe says stands in the spec. */
function holds(spec: Json | undefined, fragment: unknown): boolean {
  if (!isObject(fragment)) return JSON.stringify(spec) === JSON.stringify(fragment);
  return (
    isObject(spec) && Object.entries(fragment).every(([name, inner]) => holds(spec[name], inner))
  );
}

/** The service's presets and one's own recipes: what each is for, and why its fields are so. */
export function Presets({
  spec,
  onChoose,
}: {
  spec: JsonObject;
  onChoose: (fragment: JsonObject) => void;
}) {
  const query = useQuery({
    queryKey: ['recipes'],
    queryFn: ({ signal }) => readRecipes(signal),
    staleTime: 60_000,
  });
  if (query.isPending) return <Loading label="Reading the presets" />;
  if (query.isError) return <ErrorState error={query.error} onRetry={() => void query.refetch()} />;
  return (
    <ul className="presets" aria-label="Presets">
      {query.data.map((recipe) => {
        const chosen = holds(spec, recipe.fragment);
        return (
          <li key={`${recipe.owner ?? ''}${recipe.name}`}>
            <button
              type="button"
              className="preset"
              aria-pressed={chosen}
              onClick={() => onChoose(recipe.fragment as JsonObject)}
            >
              <span className="preset-name">{recipe.name}</span>
              <span className="preset-title">
                {recipe.title ?? (recipe.preset ? '' : `Yours, version ${recipe.version}`)}
              </span>
              {recipe.description && (
                <span className="hint">
                  <Words text={recipe.description} />
                </span>
              )}
              {recipe.needs && <span className="preset-needs">Needs: {recipe.needs}</span>}
            </button>
          </li>
        );
      })}
    </ul>
  );
}
