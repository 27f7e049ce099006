-- The changes of one key by an operator or the reconciler, newest first.
SELECT at, who, event, scope, key, job_id, before, after, why
FROM idempotency_audit
WHERE scope = ? AND key = ?
ORDER BY id DESC LIMIT ?
