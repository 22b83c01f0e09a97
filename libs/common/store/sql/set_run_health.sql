-- One of active, stalled, orphaned for another, by an owner no older than any that wrote before.
update runs set state = %(state)s, saved_epoch = %(epoch)s
where run = %(run)s and state in ('active', 'stalled', 'orphaned') and saved_epoch <= %(epoch)s
returning run
