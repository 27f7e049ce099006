-- Set the recovery point and a new lease.
UPDATE idempotency_keys SET recovery_point = :name, lease_until = :now + :lease_seconds
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'
