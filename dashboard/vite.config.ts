import { fileURLToPath } from 'node:url';
import react from '@vitejs/plugin-react';
import { defineConfig } from 'vitest/config';

// In development the API answers at another address; the pages ask their own origin in both cases.
// The host stays the page's own: the service compares it with the origin of a request.
const api = {
  target: process.env.OCTRAIN_API_URL ?? 'http://127.0.0.1:8642',
  changeOrigin: false,
};

export default defineConfig({
  base: '/dashboard/',
  plugins: [react()],
  resolve: { alias: { '~': fileURLToPath(new URL('./src', import.meta.url)) } },
  build: {
    target: 'es2022',
    // No data: addresses, so that the content security policy needs no exception for them.
    assetsInlineLimit: 0,
    manifest: true,
    sourcemap: false,
    chunkSizeWarningLimit: 700,
  },
  server: { proxy: { '/v1': api, '/openapi.json': api } },
  test: { environment: 'node', include: ['src/**/*.test.ts', 'src/**/*.test.tsx'] },
});
