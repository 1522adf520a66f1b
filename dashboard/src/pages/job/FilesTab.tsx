import { useQuery } from '@tanstack/react-query';
import type { Schemas } from '~/api/client';
import { Card, Wide } from '~/components/Page';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { formatBytes } from '~/format/numbers';
import { formatTime, viewerZone } from '~/format/times';
import { type Job, jobPath, readJson } from './useJob';

type Artifact = Schemas['ArtifactObject'];

/** What the job made: the model as one archive, checkpoints, reports and logs, each to download. */
export default function FilesTab({ job }: { job: Job }) {
  const artifacts = useQuery({
    queryKey: ['job', job.id, 'events', 'artifacts'],
    queryFn: ({ signal }) =>
      readJson<Schemas['ArtifactList']>(`${jobPath(job.id)}/artifacts`, signal),
  });
  if (artifacts.isPending) return <Loading label="Reading the files" />;
  if (artifacts.isError && !artifacts.data) {
    return <ErrorState error={artifacts.error} onRetry={() => void artifacts.refetch()} />;
  }
  const items = artifacts.data?.items ?? [];
  if (items.length === 0) {
    return (
      <EmptyState title={job.is_final ? 'This job left no files' : 'No files yet'}>
        {job.is_final
          ? 'It ended before it wrote any, or they were removed.'
          : 'Checkpoints appear here as they are written, the model at the end.'}
      </EmptyState>
    );
  }
  // Each was the best of its time; the newest of them still is.
  const best = items.findLast((artifact) => artifact.best);
  const model = items.some(({ kind }) => kind === 'model');
  return (
    <Card
      title="Files"
      actions={
        <>
          <span className="hint">Times in {viewerZone()}</span>
          {model && (
            <a className="button primary small" href={`${jobPath(job.id)}/model`} download>
              Download the model
            </a>
          )}
        </>
      }
    >
      <Wide label="Files of the job">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Name</th>
              <th scope="col">Kind</th>
              <th scope="col">Step</th>
              <th scope="col">Attempt</th>
              <th scope="col" className="number">
                Size
              </th>
              <th scope="col">Written</th>
              <th scope="col">Files</th>
            </tr>
          </thead>
          <tbody>
            {items.map((artifact) => (
              <tr key={artifact.id}>
                <td className="nowrap">{artifact.name}</td>
                <td>
                  {artifact.kind} {artifact === best && <span className="badge good">best</span>}
                </td>
                <td>{artifact.step?.toLocaleString('en-US') ?? '–'}</td>
                <td>{artifact.attempt}</td>
                <td className="number">{formatBytes(artifact.size)}</td>
                <td className="nowrap">{formatTime(artifact.created_at)}</td>
                <td>
                  <Files artifact={artifact} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Wide>
    </Card>
  );
}

function Files({ artifact }: { artifact: Artifact }) {
  const base = `${jobPath(artifact.job_id)}/artifacts/${artifact.id}/files`;
  const links = artifact.files.map((file) => (
    <a
      key={file.path}
      href={`${base}/${file.path.split('/').map(encodeURIComponent).join('/')}`}
      download
      title={`sha256 ${file.sha256}`}
    >
      {file.path} <span className="hint">{formatBytes(file.size)}</span>
    </a>
  ));
  if (links.length === 1) return links[0];
  return (
    <details>
      <summary>{links.length} files</summary>
      <div className="file-links">{links}</div>
    </details>
  );
}
