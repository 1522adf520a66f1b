/** The navigation: what is not here is reached from a page. */
export const navigation = [
  { to: '/jobs', label: 'Jobs' },
  { to: '/jobs/new', label: 'New job' },
  { to: '/compare', label: 'Compare' },
  { to: '/nodes', label: 'Nodes' },
  { to: '/usage', label: 'Usage' },
  { to: '/webhooks', label: 'Webhooks' },
  { to: '/keys', label: 'Keys' },
] as const;
