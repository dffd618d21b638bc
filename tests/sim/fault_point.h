/* Where the product passes a fault point, the scheduler may take over. */
#ifndef TESTS_SIM_FAULT_POINT_H
#define TESTS_SIM_FAULT_POINT_H
int sim_at_fault_point(int fault);
#endif
