// The variants of the event path (events.hpp has the model): first the rules as they are, then what breaks when one of
// them is taken away.
#include "events.hpp"

using O = Events::Options;
using E = Events;

void two_sources(O& o) {
  o.sources = 2;
  o.faults = 2;
  o.freezes = o.lost_replies = o.drops = 0;
}

const std::vector<Variant<Events>> VARIANTS = {
    {"ids-1-fault", holds(11114), [](O& o) { o.faults = 1; }},
    {"replay-1-fault", holds(12362),
     [](O& o) {
       o.how = REPLAYS;
       o.faults = 1;
     }},
    {"live-1-fault", holds(27739),
     [](O& o) {
       o.how = LIVE_ONLY;
       o.faults = 1;
     }},
    {"two-sources-1-fault", holds(619511),
     [](O& o) {
       two_sources(o);
       o.faults = 1;
     }},
    {"live", holds(4'138'721),
     [](O& o) {
       o.how = LIVE_ONLY;
       o.events = 3;
       o.faults = 2;
     }},
    {"replay", holds(6'924'922), [](O& o) { o.how = REPLAYS; }},
    {"ids", holds(19'650'821), [](O& o) { o.events = 3; }},
    {"two-sources", holds(21'438'125), [](O& o) { two_sources(o); }},
    {"acquire-in-two-scripts", holds(12'792'209), [](O& o) { o.acquire_in_one_script = false; }},
    {"append-checks-lease", holds(4'984'642), [](O& o) { o.append_checks_lease = true; }},
    {"half-applied", holds(5'264'828), [](O& o) { o.half_appends = 1; }},
    {"owner-stops-when-lease-gone", holds(5'538'066), [](O& o) { o.owner_puts_lease_back = false; }},
    {"clock-back-epoch-in-postgres", holds(5'074'386), [](O& o) { o.clock_back = o.epoch_in_postgres = true; }},
    // Without a loss of the stream growing ids are fence enough.
    {"lease-never-checked", holds(1'146'051),
     [](O& o) {
       o.acquire_in_one_script = o.append_compares_tail = false;
       o.fail_overs = o.flushes = 0;
     }},
    {"X-seq-restarts", breaks(E::NO_HOLE, 500535),
     [](O& o) {
       o.birth = AT_ZERO;
       o.arithmetic = GAP_IF_GREATER;
       o.marker_rule = false;
     }},
    {"X-seq-restarts-gap-unless-successor", breaks(E::NO_HOLE, 808887),
     [](O& o) {
       o.birth = AT_ZERO;
       o.marker_rule = false;
       o.events = 3;
     }},
    {"X-seq-from-postgres", breaks(E::NO_REPEAT, 195265),
     [](O& o) {
       o.birth = AT_POSTGRES;
       o.faults = 2;
     }},
    {"X-reborn-at-the-epoch", breaks(E::NO_NEEDLESS_GAP, 1512),
     [](O& o) {
       o.birth = AT_EPOCH;
       o.acquire_in_one_script = false;
     }},
    {"X-marker-takes-a-number", breaks(E::NO_NEEDLESS_GAP, 3225), [](O& o) { o.marker_repeats_seq = false; }},
    {"X-no-marker-rule", breaks(Checker<E>::RESOLVES, 5'337'469), [](O& o) { o.marker_rule = false; }},
    {"X-tail-uid-only", breaks(E::NO_REPEAT, 366077),
     [](O& o) {
       two_sources(o);
       o.resume_points_kept = false;
       o.faults = 1;
       o.freezes = o.lost_replies = o.drops = 1;
     }},
    {"X-live-no-discontinuity", breaks(E::NO_HOLE, 21199),
     [](O& o) {
       o.how = LIVE_ONLY;
       o.discontinuity_after_reopen = false;
       o.events = 3;
       o.faults = 2;
     }},
    {"X-clock-back", breaks(E::NO_HOLE, 638203), [](O& o) { o.clock_back = true; }},
    {"X-readers-drop-old", breaks(E::NO_REPEAT, 745114),
     [](O& o) {
       two_sources(o);
       o.reader_drops_old = true;
       o.marker_rule = false;
       o.flushes = o.trims = 0;
     }},
    {"X-no-repeat-after-gap", breaks(E::NO_REPEAT, 225100), [](O& o) { o.no_repeat_after_gap = true; }},
    {"X-no-arithmetic", breaks(E::NO_HOLE, 699358),
     [](O& o) {
       o.arithmetic = NO_GAPS;
       o.marker_rule = false;
     }},
    {"X-fresh-reader-unchecked", breaks(E::NO_HOLE, 561345), [](O& o) { o.first_seq_known = false; }},
    {"X-append-anywhere", breaks(Checker<E>::RESOLVES, 4'215'627), [](O& o) { o.append_compares_tail = false; }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
