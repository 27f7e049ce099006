-- The changes of one key by an operator or the reconciler, newest first.
SELECT date_part('epoch', a.at), a.who, a.event, a.scope, a.key, a.job_id, a.before, a.after, a.why
FROM idempotency_audit AS a
WHERE a.scope = %(scope)s AND a.key = %(key)s
ORDER BY a.id DESC
LIMIT %(limit)s
