// The variants of the job path (jobs.hpp and jobs_state.hpp have the model): first the rules as they are, then what
// breaks when one of them is taken away.
#include "jobs.hpp"

using O = Jobs::Options;
using J = Jobs;

void one_fault(O& o) {
  o.faults = 1;
  o.gateways = 1;
}
void one_gateway(O& o) { o.gateways = 1; }

const std::vector<Variant<Jobs>> VARIANTS = {
    {"1-fault", holds(96543), [](O& o) { one_fault(o); }},
    {"1-fault-2-gateways", holds(779513),
     [](O& o) {
       o.faults = 1;
       o.outages = o.freezes = 0;
     }},
    {"1-fault-2-machines", holds(396115),
     [](O& o) {
       one_fault(o);
       o.machines = 2;
     }},
    {"1-fault-forgetting-journal", holds(97393),
     [](O& o) {
       one_fault(o);
       o.losses = 1;
     }},
    {"1-fault-no-group", holds(70915),
     [](O& o) {
       one_fault(o);
       o.no_group = true;
     }},
    {"1-fault-poison", holds(861328),
     [](O& o) {
       one_fault(o);
       o.poison = true;
       o.limit = 2;
     }},
    {"2-cuts", holds(1'969'625),
     [](O& o) {
       one_gateway(o);
       o.outages = o.gateway_kills = o.freezes = o.flushes = 0;
     }},
    {"2-faults-no-group", holds(2'007'320),
     [](O& o) {
       one_gateway(o);
       o.no_group = true;
     }},
    {"2-faults-forgetting-journal", holds(3'531'730),
     [](O& o) {
       one_gateway(o);
       o.losses = 1;
     }},
    {"2-faults-finish-not-fenced", holds(3'403'638),
     [](O& o) {
       one_gateway(o);
       o.finish_fenced = false;
     }},
    {"2-faults-2-drops", holds(5'845'563),
     [](O& o) {
       one_gateway(o);
       o.drops = 2;
       o.limit = 3;
     }},
    {"2-faults-unasked-outcomes", holds(9'745'612),
     [](O& o) {
       one_gateway(o);
       o.unasked_outcomes = true;
     }},
    {"2-faults-claims-when-epoch-raised", holds(13'800'162),
     [](O& o) {
       one_gateway(o);
       o.claims_again = false;
       o.claims_when_epoch_raised = true;
     }},
    {"2-faults-blocking-read-claims-again", holds(5'956'358),
     [](O& o) {
       one_gateway(o);
       o.fenced_read = false;
     }},
    {"2-gateways-poison", holds(9'264'244),
     [](O& o) {
       o.poison = true;
       o.limit = 2;
       o.faults = 1;
     }},
    {"2-faults-2-machines-no-group", holds(14'623'123),
     [](O& o) {
       one_gateway(o);
       o.machines = 2;
       o.losses = 1;
       o.no_group = true;
     }},
    {"2-faults-2-machines-forgetting-journal", holds(17'095'624),
     [](O& o) {
       one_gateway(o);
       o.machines = 2;
       o.losses = 1;
       o.outages = o.gateway_kills = o.freezes = o.flushes = 0;
     }},
    {"2-faults-2-machines", holds(25'144'423),
     [](O& o) {
       one_gateway(o);
       o.machines = 2;
     }},
    {"2-faults-2-gateways", holds(36'229'043), [](O&) {}},
    {"3-faults", holds_in_first(14'000'000),
     [](O& o) {
       one_gateway(o);
       o.faults = 3;
       o.outages = o.gateway_kills = 0;
     }},
    {"3-faults-no-group", holds_in_first(14'000'000),
     [](O& o) {
       one_gateway(o);
       o.no_group = true;
       o.faults = 3;
     }},
    {"blind-sweeper", holds_in_first(14'000'000),
     [](O& o) {
       one_gateway(o);
       o.enqueue_idempotent = false;
     }},
    {"X-record-not-guarded", breaks(J::ONE_END, 17238),
     [](O& o) {
       one_fault(o);
       o.record_guarded = o.record_published = false;
     }},
    {"X-own-result-published", breaks(J::TOLD_THE_RECORD, 30997),
     [](O& o) {
       one_fault(o);
       o.record_published = false;
     }},
    {"X-finish-only-by-holder", breaks(Checker<J>::RESOLVES, 58329),
     [](O& o) {
       one_fault(o);
       o.settle_by_anyone = o.rereads_records = o.machine_returns = false;
       o.flushes = 0;
     }},
    {"X-no-begin-mark", breaks(J::DID_NOT_RUN, 362540), [](O& o) { o.begin_mark = o.pinned_to_machine = false; }},
    {"X-no-begin-mark-naive-deadline", breaks(J::DID_NOT_RUN, 103826),
     [](O& o) { o.begin_mark = o.pinned_to_machine = o.withdraw_before_expiry = false; }},
    {"X-not-pinned-to-machine", breaks(J::ONCE, 79927),
     [](O& o) {
       one_gateway(o);
       o.machines = 2;
       o.pinned_to_machine = false;
       o.outages = o.gateway_kills = 0;
       o.faults = 1;
     }},
    {"X-no-horizon", breaks(J::ONCE, 331823),
     [](O& o) {
       one_gateway(o);
       o.losses = 1;
       o.horizon = false;
       o.outages = o.gateway_kills = 0;
     }},
    {"X-blocking-read-one-claim", breaks(Checker<J>::PROMPTLY, 384375),
     [](O& o) {
       one_fault(o);
       o.fenced_read = o.claims_again = false;
     }},
    {"X-fenced-read-one-claim", breaks(Checker<J>::PROMPTLY, 1'538'883),
     [](O& o) {
       one_gateway(o);
       o.claims_again = false;
       o.kills = o.worker_kills = o.freezes = o.outages = o.gateway_kills = 0;
     }},
    {"X-records-not-read-again", breaks(Checker<J>::RESOLVES, 96543),
     [](O& o) {
       one_fault(o);
       o.rereads_records = false;
     }},
    {"X-record-not-read-after-registering", breaks(Checker<J>::RESOLVES, 8463),
     [](O& o) {
       o.reads_record_after_registering = o.rereads_records = false;
       o.faults = 0;
     }},
    {"X-poison-counts-joins", breaks(J::DID_NOT_RUN, 431793),
     [](O& o) {
       one_gateway(o);
       o.running_is_no_poison = o.poison_is_unknown = false;
       o.limit = 2;
       o.drops = 2;
     }},
    {"X-no-sweeper", breaks(Checker<J>::PROMPTLY, 14878),
     [](O& o) {
       one_fault(o);
       o.sweeper = false;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
