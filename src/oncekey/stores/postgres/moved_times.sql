-- The columns of columns.sql for a row that was just moved: key, times, and the recovery point, which the owner may have
-- advanced since the mover read the row. The rest cannot have changed under the same (state, owner), and is known.
k.scope, k.key, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
date_part('epoch', k.lease_until), k.recovery_point, NULL, NULL, NULL, NULL, NULL, date_part('epoch', k.reconcile_at), NULL,
NULL, date_part('epoch', k.finished_at), NULL, date_part('epoch', k.expires_at), date_part('epoch', now())
