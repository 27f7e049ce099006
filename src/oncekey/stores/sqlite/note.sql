-- One line of the audit.
INSERT INTO idempotency_audit (at, who, event, scope, key, job_id, before, after, why)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
