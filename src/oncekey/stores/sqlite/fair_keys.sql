-- The oldest due keys of one scope. ?1 the state · ?2 the scope · ?3 now · ?4 limit
SELECT k.scope, k.key FROM idempotency_keys AS k
WHERE k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
  AND k.state = ?1 AND k.scope = ?2 AND k.reconcile_at <= ?3
ORDER BY k.reconcile_at, k.key LIMIT ?4
